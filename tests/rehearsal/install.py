"""The environment of the rehearsal: torch's CUDA wheel in a folder of its own, with our libraries in NVIDIA's place.

`python -m tests.rehearsal.install` makes it. The wheel is downloaded once, by the hash in locks/rehearsal.txt, into
`.rehearsal/` of the checkout, which git ignores. Of each library that the wheel's own link to and that is not there
(libcudart, libcublas, libnccl …) one of the same name is compiled: what runtime/ defines, and a stub for every other
symbol. A call of cuBLAS that nobody defines succeeds and computes nothing; any other such call ends the process and
names itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = ROOT / ".rehearsal"
SITE = HOME / "site"
LIBRARIES = SITE / "torch" / "lib"
RUNTIME = Path(__file__).with_name("runtime")
LOCK = ROOT / "locks" / "rehearsal.txt"
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


def prepare() -> Path:
    """The folder for PYTHONPATH, made if it is not there. Unavailable where that cannot be."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or sys.version_info[:2] != (3, 11):
        raise Unavailable("the wheel is for CPython 3.11 on x86-64 Linux")
    if missing := [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]:
        raise Unavailable(f"there is no {', no '.join(missing)} here")
    HOME.mkdir(exist_ok=True)
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install()
        _build()
    return SITE


def _install() -> None:
    done, key = HOME / "installed", sha256(LOCK.read_bytes()).hexdigest()
    if done.exists() and done.read_text() == key:
        return
    shutil.rmtree(SITE, ignore_errors=True)
    print("rehearsal: installing torch's CUDA wheel into .rehearsal (527 MB, once) …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--no-compile", "--only-binary", ":all:", "--require-hashes"]
    ended = subprocess.run(
        [*command, "--target", str(SITE), "-r", str(LOCK)], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise Unavailable(
            "torch's CUDA wheel cannot be had: " + (ended.stderr.strip().splitlines() or ["pip failed"])[-1]
        )
    done.write_text(key)


def _build() -> None:
    sources = sorted(RUNTIME.iterdir())
    content = b"".join(path.read_bytes() for path in [*sources, Path(__file__)]) + LOCK.read_bytes()
    done, key = HOME / "built", sha256(content).hexdigest()
    if done.exists() and done.read_text() == key:
        return
    done.unlink(missing_ok=True)
    about = SITE / "eft_rehearsal-0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: eft-rehearsal\nVersion: 0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    (SITE / "sitecustomize.py").write_text(AT_START)
    for soname, symbols in sorted(_missing().items()):  # libcudart comes before libnccl, which is linked to it
        _library(soname, symbols)
    done.write_text(key)


def _missing() -> dict[str, set[str]]:
    """Name of each library that the wheel's link to and that is neither in it nor the system's → the symbols that they
    take from it."""
    ours = [path for path in LIBRARIES.glob("*.so") if not path.is_symlink()]
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


def _library(soname: str, symbols: set[str]) -> None:
    name = soname.partition(".so")[0]
    files = [RUNTIME / file for file in SOURCES.get(name, []) if (RUNTIME / file).exists()]
    defined = {
        symbol for file in files for symbol in re.findall(r"^API [^(\n]*?(\w+)\(", file.read_text(), re.MULTILINE)
    }
    work = HOME / "build" / name
    work.mkdir(parents=True, exist_ok=True)
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
    command += [f"-Wl,-soname,{soname}", f"-Wl,--version-script={work / 'versions'}", "-o", str(work / soname)]
    linked = ["-L", str(LIBRARIES), "-l:libcudart.so.13"] if name == "libnccl" else []
    command += [*map(str, files), str(work / "stubs.c"), *linked, "-lpthread", "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{soname} does not compile:\n{ended.stderr}")
    os.replace(work / soname, LIBRARIES / soname)


if __name__ == "__main__":
    try:
        print(prepare())
    except Unavailable as why:
        sys.exit(f"no rehearsal: {why}")
