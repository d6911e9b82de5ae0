"""The self-test of this machine's CPU, made once a machine and laid into the data roots of tests."""

from __future__ import annotations

import fcntl
import os
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


def verdict(inherited: Mapping[str, str] = os.environ) -> Verdict:
    """The real one, of the CPU, as a worker with these variables would find it."""
    HOME.mkdir(parents=True, exist_ok=True)
    environment = child_environment("train", gpu=None, threads=1, root=HOME, inherited=inherited)
    device = SelfTestDevice("cpu", None, environment)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return remembered(device, "tests", HOME) or examine(device, "tests", HOME, 120.0)


def lay(data: Path, node: str, slot: str = "cpu", inherited: Mapping[str, str] = os.environ, **changes: Any) -> None:
    """A worker of that node with that data root need not make it again. `changes`: fields of the verdict."""
    known = verdict(inherited).model_copy(update={"node": node, "slot": slot, **changes})
    for folder in (data, data / "cache", data / "cache" / "selftest"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(selftest.folder(data / "cache") / f"{node}-{known.key}.json", selftest.encoded(known))
