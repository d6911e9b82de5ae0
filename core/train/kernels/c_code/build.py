"""Compiles the C kernels with the machine's own compiler, keeps the object, and loads it.

The object is kept under a hash of source, compiler, flags and processor in `~/.cache/eft/kernels`: the trainer's home
lies on the data root, so it outlives a job.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from core.base.files import sync
from core.train.kernels.c_code.calls import NAMES

HERE = Path(__file__).parent
SOURCES = [HERE / "native.c", HERE / "few_rows.c"]
HEADER = HERE / "native.h"
FLAGS = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-std=gnu11"]


class NativeUnavailable(Exception):
    """Why the C kernels are not used."""


def load() -> ctypes.CDLL:
    """The kernels, not tried yet; NativeUnavailable."""
    if os.environ.get("EFT_KERNELS") == "portable":
        raise NativeUnavailable("EFT_KERNELS=portable asks for it")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NativeUnavailable("there is no C compiler (cc, gcc or clang) on the PATH")
    kept = _cache_folder()
    with tempfile.TemporaryDirectory(prefix="eft-kernels-") as aside:
        target = (kept or Path(aside)) / f"native-{_key(compiler)}.so"
        try:
            if not target.is_file():
                _compile(compiler, Path(aside) / "made.so", target)
            loaded = ctypes.CDLL(str(target))  # stays loaded when the file goes
            for name in NAMES:
                getattr(loaded, name).restype = None
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            if kept is not None:
                target.unlink(missing_ok=True)  # damaged: the next process makes it anew
            raise NativeUnavailable(f"{target.name} cannot be made or loaded: {error}") from error
    return loaded


def _cache_folder() -> Path | None:
    """Private to this user: what lies there is run as code."""
    try:
        folder = Path.home() / ".cache" / "eft" / "kernels"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = folder.stat()
        mine = about.st_uid == os.getuid() and not about.st_mode & 0o022
        return folder if mine and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):  # no home, or one that cannot be written: compiled anew in every process
        return None


def processor() -> str:
    """What tells this processor from others: its model and the instructions that it has."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    source = b"\0".join(path.read_bytes() for path in (*SOURCES, HEADER))
    parts = [source, version, " ".join(FLAGS).encode(), processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _compile(compiler: str, aside: Path, target: Path) -> None:
    done = subprocess.run(
        [compiler, *FLAGS, *map(str, SOURCES), "-o", str(aside)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    if done.returncode != 0:
        raise NativeUnavailable(f"{compiler} failed: {done.stderr.strip()[-500:]}")
    near = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(aside, near)
    sync(near)  # a truncated file would crash the process that loads it
    near.rename(target)
