"""Keeps a base image's PyTorch what it is: `note` it, `join` our packages to it, `check` that nothing replaced it.

Dockerfile.rocm and Dockerfile.cuda run these steps in this order. ROCm's and CUDA's builds of torch come with libraries
of exactly their versions; a torch that pip brought in their place would install, import, and compute on the CPU. This
file imports nothing of eft: `note` and `join` run under the base's interpreter, which has nothing of ours.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

NOTE = Path("/opt/eft/base-torch.json")
VENV = Path("/opt/eft/venv")
OURS = ("transformers", "peft", "safetensors", "accelerate", "pydantic", "sqlalchemy", "celery")
"""Must come from our environment, at the versions of locks/app.txt, whatever the base has of them."""


def torch_here() -> dict[str, Any]:
    """The torch that this interpreter finds: version, folder of packages, digest of the list of its files.

    Raises SystemExit without one."""
    try:
        found = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{sys.executable} has no torch: name the base's interpreter that has, --build-arg PYTHON=…")
    record = found.read_text("RECORD") or ""
    return {
        "version": found.version,
        "packages": str(Path(str(found.locate_file(""))).resolve()),
        "files": hashlib.sha256(record.encode()).hexdigest(),
    }


def own_packages() -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(VENV), "platbase": str(VENV)}, scheme="venv"))


def note() -> None:
    NOTE.write_text(json.dumps(torch_here()))
    print(f"the base's torch: {NOTE.read_text()}")


def join() -> None:
    """Put the base's packages behind ours on the path of our environment."""
    torch = json.loads(NOTE.read_text())
    if list(own_packages().glob("torch-*.dist-info")):
        sys.exit("pip installed a torch of its own into our environment: what asked for it?")
    folders = [torch["packages"], *(path for path in sys.path if path.endswith(("site-packages", "dist-packages")))]
    lines = [f"import site; site.addsitedir({str(Path(path).resolve())!r})" for path in dict.fromkeys(folders)]
    (own_packages() / "base-image.pth").write_text("\n".join(lines) + "\n")


def check(build: str, targets: str) -> None:
    """Raises SystemExit where torch is not the base's, not built for `build`, or without kernels for a target."""
    kept, now = json.loads(NOTE.read_text()), torch_here()
    if kept != now:
        sys.exit(f"torch was replaced: the base brought {kept}, and now it is {now}")
    for name in OURS:
        folder = str(importlib.metadata.distribution(name).locate_file(""))
        if not Path(folder).is_relative_to(VENV):
            sys.exit(f"{name} comes from {folder}, not from the locked packages in {VENV}")
    import torch

    if not Path(torch.__file__).is_relative_to(now["packages"]):
        sys.exit(f"torch is imported from {torch.__file__}, not from {now['packages']}")
    built = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    if built != build:
        sys.exit(f"torch {torch.__version__} is built for {built}, and this image is for {build}")
    # Compiled in, so known without a GPU: `gfx90a gfx942 …`, or `sm_80 … compute_120`.
    kernels = [] if built == "cpu" else re.findall(r"\w+", torch._C._cuda_getArchFlags() or "")
    missing = [target for target in re.findall(r"\w+", targets) if target not in kernels]
    if missing:
        sys.exit(f"torch {torch.__version__} has no kernels for {', '.join(missing)}; it has {' '.join(kernels)}")
    import peft
    import transformers

    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.exists():
        sys.exit(f"{headers} is missing: Triton could compile nothing")
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        sys.exit("no C compiler on the PATH: Triton could compile nothing")
    print(f"torch {torch.__version__} is the base's; kernels for {' '.join(kernels) or 'the CPU'}")
    print(f"transformers {transformers.__version__}, peft {peft.__version__} are the locked ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("note")
    commands.add_parser("join")
    last = commands.add_parser("check")
    last.add_argument("--build", choices=["rocm", "cuda", "cpu"], required=True)
    last.add_argument("--targets", default="")
    asked = parser.parse_args()
    match asked.command:
        case "note":
            note()
        case "join":
            join()
        case "check":
            check(asked.build, asked.targets)


if __name__ == "__main__":
    main()
