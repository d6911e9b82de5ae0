"""The self-test of this machine's CPU, the C kernels that it compiled, and matplotlib's list of fonts: made once a
machine and laid into the data roots of tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.base.files import write_private
from core.hardware import selftest
from core.hardware.selftest import Verdict
from worker.environment import child_environment
from worker.gpus.selftest_runner import SelfTestDevice, examine, remembered

HOME = Path(tempfile.gettempdir()) / f"eft-tests-{os.getuid()}" / "selftest"
CACHES = Path("home") / ".cache"
"""Below a data root. Trainers keep compiled kernels there (kernels/c_code/build.py), and matplotlib its fonts."""


def verdict(inherited: Mapping[str, str] = os.environ) -> Verdict:
    """The real one, of the CPU, as a worker with these variables would find it."""
    HOME.mkdir(parents=True, exist_ok=True)
    environment = child_environment("train", gpu=None, threads=1, root=HOME, inherited=inherited)
    device = SelfTestDevice("cpu", None, environment)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list((HOME / CACHES).glob("matplotlib/fontlist-*.json")):
            code = "import matplotlib.font_manager"
            subprocess.run([sys.executable, "-c", code], env={**environment, "HOME": str(HOME / "home")}, check=True)
        return remembered(device, "tests", HOME) or examine(device, "tests", HOME, 120.0)


def lay(data: Path, node: str, slot: str = "cpu", inherited: Mapping[str, str] = os.environ, **changes: Any) -> None:
    """A worker of that node with that data root need not make it again, nor its trainers compile kernels and look for
    fonts (a CPU second). `changes`: fields of the verdict."""
    known = verdict(inherited).model_copy(update={"node": node, "slot": slot, **changes})
    for folder in (data, data / "cache", data / "cache" / "selftest"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(selftest.folder(data / "cache") / f"{node}-{known.key}.json", selftest.encoded(known))
    (data / "home").mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(HOME / CACHES, data / CACHES, dirs_exist_ok=True)
    for path in (data / "home").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
