"""Which PyTorch `make …` installs: `python3 -m core.hardware.choose_torch auto|rocm|cuda|cpu [--arch gfx1100]`.

Answers with three words: the package and its index for pip, and which of rocm, cuda and cpu it is, from the table of
builds (wheels.py) and the GPUs of this box; what was chosen and why goes to stderr. It runs before anything is
installed, so under a bare Python 3.11.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Literal, get_args

from core.hardware.device_mask import HardwareError
from core.hardware.discover import Box, discover
from core.hardware.tables import wheels
from core.hardware.tables.wheels import Build

Kind = Literal["rocm", "cuda", "cpu"]
VENDOR = {"rocm": "amd", "cuda": "nvidia"}
USUAL = {"rocm": "gfx1100", "cuda": "sm_90"}
"""Without a GPU in this box: the build for it has kernels for most."""


class NoBuild(Exception):
    """None fits; the message says why."""


def pick(kind: Kind, arches: Sequence[str]) -> tuple[Build, str]:
    """The build for all of `arches`, and the architecture it is asked for. Raises NoBuild."""
    if kind == "cpu":
        build = wheels.lookup("cpu")
        assert build is not None
        return build, "cpu"
    found: dict[str, Build] = {}
    for arch in arches:
        build = wheels.lookup(arch)
        if build is None or (kind == "rocm") != arch.startswith("gfx"):
            known = sorted(one for row in wheels.BUILDS for one in row.arches if one.startswith(("gfx", "sm_")))
            raise NoBuild(
                f"no build of PyTorch is known for {arch} with TORCH={kind}; the table has {', '.join(known)}"
            )
        if not build.index:
            raise NoBuild(f"{arch}: {build.note} (docs/hardware.md, Builds of PyTorch)")
        found[arch] = build
    requirements = {(build.index, build.requirement(arch)) for arch, build in found.items()}
    if len(requirements) > 1:
        kinds = ", ".join(f"{arch} {build.install(arch)}" for arch, build in found.items())
        raise NoBuild(
            f"the cards of this box need different builds ({kinds}): name one, ARCH=…, and serve its cards (EFT_GPUS)"
        )
    arch = arches[0]
    return found[arch], arch


def of_box(box: Box, kind: Kind) -> list[str]:
    """Architectures of the box's GPUs of that kind, unusable ones left out but for want of permission, which the
    installation of PyTorch does not need."""
    seen = [*box.gpus, *(one.gpu for one in box.excluded if one.broken)]
    return sorted({gpu.arch.partition(":")[0] for gpu in seen if gpu.vendor == VENDOR.get(kind) and gpu.arch})


def here(kind: Kind) -> tuple[list[str], str]:
    """(what to ask the table for, what to tell)."""
    if kind == "cpu":
        return [], ""
    if arches := of_box(discover(environ={}), kind):
        return arches, f"for {', '.join(arches)} of this box"
    return [USUAL[kind]], "no such GPU found here: the usual build; ARCH=… names another"


def automatic(box: Box) -> tuple[Kind, list[str], str]:
    """What the GPUs of the box need, or the build for the CPU, and what to tell. Raises NoBuild for GPUs of two
    makers, of which only a person knows which are meant."""
    found: dict[Kind, list[str]] = {kind: arches for kind in get_args(Kind) if (arches := of_box(box, kind))}
    if len(found) > 1:
        raise NoBuild("this box has GPUs of AMD and of NVIDIA: name one, TORCH=rocm or TORCH=cuda")
    for kind, arches in found.items():
        try:
            pick(kind, arches)
        except NoBuild as error:
            return "cpu", [], f"because {error}"
        return kind, arches, f"for {', '.join(arches)} of this box"
    return "cpu", [], "because no GPU was found here (TORCH=rocm or TORCH=cuda names one)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python3 -m core.hardware.choose_torch", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("kind", choices=("auto", *get_args(Kind)))
    parser.add_argument("--arch", default="", help="instead of this box's GPUs, e.g. gfx1100 or sm_90")
    asked = parser.parse_args(arguments)
    kind: Kind = asked.kind
    try:
        if asked.kind == "auto":
            kind, arches, words = automatic(discover(environ={}))
        else:
            arches, words = ([asked.arch], f"for {asked.arch}") if asked.arch else here(kind)
        build, arch = pick(kind, arches)
    except (NoBuild, HardwareError) as error:
        print(f"TORCH={asked.kind}: {error}", file=sys.stderr)
        return 1
    print(f"TORCH={kind}{words and ' '}{words}: {build.requirement(arch)} from {build.index}", file=sys.stderr)
    print(f"  by {', '.join(build.sources)}, read {wheels.READ}", file=sys.stderr)
    if build.gigabytes:
        print(f"  {build.gigabytes:g} GB to download", file=sys.stderr)
    print(build.requirement(arch), build.index, kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
