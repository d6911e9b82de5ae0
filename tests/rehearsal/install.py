"""The environment of the rehearsal: torch's CUDA wheel in a folder of its own, with our libraries in NVIDIA's place.

`python -m tests.rehearsal.install` makes it. The wheel is downloaded once, by the hash in locks/rehearsal.txt, into
`~/.cache/eft/rehearsal`, where all checkouts share it. For each library that the wheel's own link to and that is not
there (libcudart, libcublas, libnccl …) a library of the same name is compiled: what runtime/ defines, and a stub for
every other symbol. An undefined call of cuBLAS succeeds and computes nothing; any other one ends the process with its
name. Each state of runtime/ has its own folder of libraries.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RUNTIME = Path(__file__).with_name("runtime")
LOCK = ROOT / "locks" / "rehearsal.txt"


def _key(*files: Path) -> str:
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


CACHE = Path.home() / ".cache" / "eft" / "rehearsal"
HOME = CACHE / _key(LOCK)
SITE = HOME / "site"
WHEEL = SITE / "torch" / "lib"
BUILT = HOME / f"runtime-{_key(*sorted(RUNTIME.iterdir()), Path(__file__))}"
"""A folder for PYTHONPATH and for LD_LIBRARY_PATH."""
SOURCES = {
    "libcudart": ["device.c", "stream.c", "launch.c"],
    "libcublas": ["cublas.c"],
    "libcublasLt": ["cublasLt.c"],
    "libcudnn": ["cudnn.c"],
    "libcuda": ["cuda.c"],
    "libnccl": ["nccl.c"],
}
"""Library → the files of runtime/ that are in it."""
COMPUTES = ("libcublas", "libcublasLt")
"""Libraries whose calls succeed and compute nothing."""
PREFIXES = {"nccl": "libnccl", "cusparseLt": "libcusparseLt", "cuFile": "libcufile", "nvshmem": "libnvshmem_host"}
"""The library of a symbol without a version; `cu` is the driver's."""
ENTRY_POINT = "[torch.backends]\nrehearsal = tests.rehearsal.numbers:enter\n"
"""torch calls this at the end of its import."""


AT_START = "from tests.rehearsal.branches import install\n\ninstall()\n"
"""Python runs this before anything else."""


class Unavailable(Exception):
    """The environment cannot be made here; its message says why."""


def prepare() -> None:
    """Make SITE and BUILT if they are not there. Unavailable where that cannot be."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.version_info[:2] != (3, 11):
        raise Unavailable("the wheel is for CPython 3.11 on x86-64 Linux")
    if missing := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        raise Unavailable(f"there is no {', no '.join(missing)} here")
    HOME.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not SITE.exists():
            _whole(SITE, _install)
        if not BUILT.exists():
            _whole(BUILT, _build)


def _whole(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder that is either complete or not there."""
    with tempfile.TemporaryDirectory(dir=HOME) as aside:
        made = Path(aside) / "made"
        made.mkdir()
        make(made)
        made.rename(folder)


def _install(folder: Path) -> None:
    print(f"rehearsal: installing torch's CUDA wheel into {SITE} (527 MB, once) …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--no-compile", "--only-binary", ":all:", "--require-hashes"]
    command += ["--target", str(folder), "-r", str(LOCK)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or ["pip failed"]
        raise Unavailable(f"torch's CUDA wheel cannot be had: {said[-1]}")


def _build(folder: Path) -> None:
    about = folder / "eft_rehearsal-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: eft-rehearsal\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    (folder / "sitecustomize.py").write_text(AT_START)
    for soname, symbols in sorted(_missing().items()):  # libcudart comes before libnccl, which is linked to it
        _library(folder, soname, symbols)


def _missing() -> dict[str, set[str]]:
    """Name of each library that the wheel's link to and that is neither in it nor the system's → the symbols that they
    take from it."""
    ours = [path for path in WHEEL.glob("*.so") if not path.is_symlink()]
    needed = set[str]()
    for path in ours:
        listed = subprocess.run(["readelf", "-dW", path], capture_output=True, text=True, check=True).stdout
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", listed))
    vendors = re.compile(r"lib(cu|nv|nccl)")
    needed = {name for name in needed if vendors.match(name)}
    wanted: dict[str, set[str]] = defaultdict(set, {name: set() for name in needed})
    listed = subprocess.run(["nm", "-D", "--undefined-only", *ours], capture_output=True, text=True, check=True).stdout
    for symbol, version in re.findall(r" U (\w+)(?:@@?(\S+))?$", listed, re.MULTILINE):
        if version in needed:
            wanted[version].add(symbol)
        elif not version or version == "NVSHMEM":
            prefix = next((library for prefix, library in PREFIXES.items() if symbol.startswith(prefix)), None)
            if prefix is None and re.match(r"cu[A-Z]", symbol):
                prefix = "libcuda"
            if prefix is not None:
                wanted[next(name for name in needed if name.startswith(f"{prefix}.so"))].add(symbol)
    return wanted


def _library(folder: Path, soname: str, symbols: set[str]) -> None:
    name = soname.partition(".so")[0]
    files = [RUNTIME / file for file in SOURCES.get(name, []) if (RUNTIME / file).exists()]
    defined = {
        symbol for file in files for symbol in re.findall(r"^API [^(\n]*?(\w+)\(", file.read_text(), re.MULTILINE)
    }
    work = folder / "build" / name
    work.mkdir(parents=True)
    body = "return 0;" if name in COMPUTES else "absent(__func__);"
    lines = [
        "#include <stdio.h>", "#include <stdlib.h>",
        "__attribute__((unused)) static void absent(const char *name) {",
        f'    fprintf(stderr, "rehearsal: %s of {soname} was called, and there is none of it here\\n", name);',
        "    abort();", "}",
        *(f"int {symbol}(void) {{ {body} }}" for symbol in sorted(symbols - defined)),
    ]  # fmt: skip
    (work / "stubs.c").write_text("\n".join(lines) + "\n")
    version = "NVSHMEM" if name == "libnvshmem_host" else soname
    (work / "versions").write_text(
        f"{version} {{ global: *; }};\n" if name not in ("libcuda", "libnccl") else "{ global: *; };\n"
    )
    command = ["gcc", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-return-type", "-fno-builtin"]
    command += [f"-Wl,-soname,{soname}", f"-Wl,--version-script={work / 'versions'}", "-o", str(folder / soname)]
    linked = ["-L", str(folder), "-l:libcudart.so.13"] if name == "libnccl" else []
    command += [*map(str, files), str(work / "stubs.c"), *linked, "-lpthread", "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{soname} does not compile:\n{ended.stderr}")


if __name__ == "__main__":
    try:
        prepare()
    except Unavailable as why:
        sys.exit(f"no rehearsal: {why}")
