"""Libraries that cannot share eft's environment: each set in a folder of its own, pinned by hash.

A set is a file of requirements with hashes in this folder. It is installed below the data root's cache on first use
(core/train/tools/install.py).
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import Literal

ToolSet = Literal[
    "gguf", "quants", "compressed", "torchao", "lm_eval", "math", "tasks", "games", "tensorboard", "mlflow", "wandb",
    "trackio",
]  # fmt: skip
FOLDER = "tools"
"""Name of the folder below the cache."""


def requirements(tools: ToolSet) -> Path:
    """The file of requirements of a set."""
    return Path(__file__).with_name(f"requirements-{tools}.txt")


def pinned(tools: ToolSet, name: str) -> str:
    """The version of a library of a set."""
    pins = [line.split()[0] for line in requirements(tools).read_text().splitlines() if "==" in line]
    return next(pin for pin in pins if pin.startswith(f"{name}==")).partition("==")[2]


def place(tools: ToolSet, cache_dir: Path) -> Path:
    """Folder of a set below the cache, whether it is there or not: named after its requirements and the platform."""
    digest = hashlib.sha256(requirements(tools).read_bytes()).hexdigest()[:16]
    system = f"{sysconfig.get_platform()}-cp{sys.version_info.major}{sys.version_info.minor}"
    return cache_dir / FOLDER / f"{tools}-{digest}-{system}"
