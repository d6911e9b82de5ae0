"""Versions of what is installed here and of the drivers, read from files: nothing is imported, no card is touched."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

NEEDED = ("torch", "transformers", "peft", "safetensors")
"""What a worker cannot train without."""


def versions() -> dict[str, str]:
    """Python and the packages that decide numbers; `absent` for one that is not installed."""
    found = {"python": platform.python_version()}
    for name in NEEDED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def rocm_conflicts() -> dict[str, str]:
    """Packages that break a ROCm build of torch by being there, and why."""
    known = {
        "amdsmi": "torch then counts no GPUs (https://github.com/pytorch/pytorch/issues/186516); "
        "`pip uninstall amdsmi`, ROCm brings its own",
        "triton": "it takes the place of the Triton that torch brings; `pip uninstall triton` and install torch again",
    }
    installed = {(one.metadata["Name"] or "").lower() for one in distributions()}
    # ROCm's own Triton lies under the same import name as PyPI's; where torch's wheels bring none, PyPI's is no clash.
    if not installed & {"triton-rocm", "pytorch-triton-rocm"}:
        del known["triton"]
    return {name: why for name, why in known.items() if name in installed}


def drivers(root: Path = Path("/")) -> dict[str, str]:
    """Kernel and GPU drivers, as far as there are any."""
    found = {"linux": platform.release()}
    for name, path, pattern in (
        ("amdgpu", "sys/module/amdgpu/version", r"(\S+)"),  # AMD's own package; the kernel's driver has no number
        ("rocm", "opt/rocm/.info/version", r"(\S+)"),
        ("nvidia", "proc/driver/nvidia/version", r"Module\s.*?(\d+\.[\d.]+)"),
    ):
        try:
            match = re.search(pattern, (root / path).read_text(errors="replace"))
        except OSError:
            continue
        if match:
            found[name] = match[1]
    return found
