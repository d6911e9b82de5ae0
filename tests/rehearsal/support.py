"""Programs in processes of their own, over the runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from core.base import collector
from core.spec.run.folder import ORDER_FILE
from core.train.entry import standby
from tests.rehearsal.environment import variables
from tests.rehearsal.install import BUILT
from tests.support.trainer import ROOT


@cache
def imports() -> None:
    """All that a run imports, before the first: afterwards Python's collector walks it again and again."""
    with pytest.MonkeyPatch.context() as patch, collector.importing():
        patch.setenv(standby.ASK_NVML, "1")  # as they leave it, and is taken back
        standby.imports()


DEVICES = """
count, name = ctypes.c_int(), ctypes.create_string_buffer(32)
cuda.cudaGetDeviceCount(ctypes.byref(count))
print([cuda.cudaDeviceGetPCIBusId(name, 32, i) or int(name.value[5:7], 16) for i in range(count.value)])
"""


def train(run_dir: Path) -> int:
    """Run a job in this process; its exit code. On the CPU with the kernels that a GPU without Triton takes: those in C
    differ in a last bit."""
    imports()
    from core.train.kernels import interface, native
    from core.train.recipe import run

    order = json.loads((run_dir / ORDER_FILE).read_text())
    with pytest.MonkeyPatch.context() as patch:
        if order["spec"]["resources"]["accelerator"] == "cpu":
            patch.setenv("EFT_KERNELS", "portable")
            native.library.cache_clear()
        interface.backend_for.cache_clear()
        return run(run_dir)


def bare(
    program: str, environment: Mapping[str, str] = os.environ, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """A program that calls the runtime itself, as `cuda`, without torch. `settings`: as those of `variables`."""
    load = f"import ctypes; cuda = ctypes.CDLL({str(BUILT / 'libcudart.so.13')!r})"
    about = {f"REHEARSAL_{name.upper()}": str(value) for name, value in settings.items()}
    command = [sys.executable, "-S", "-c", f"{load}\n{program}"]
    return subprocess.run(
        command, env={**environment, **about}, capture_output=True, text=True, check=False, timeout=60
    )


def visible(environment: Mapping[str, str], **settings: Any) -> list[int]:
    """The numbers of the devices that a process with this environment sees, in its order."""
    found: list[int] = json.loads(bare(DEVICES, environment, **settings).stdout)
    return found


def python(
    program: str, *arguments: str, about: Mapping[str, Any] | None = None, path: Sequence[Path] = (), **settings: str
) -> subprocess.CompletedProcess[str]:
    """A program in which torch is imported. `about`: settings of the runtime; `path`: further folders for imports."""
    environment = variables(**(about or {"devices": 2})) | settings
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], *map(str, path)])
    command = [sys.executable, "-c", f"import torch\n{program}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=200)
