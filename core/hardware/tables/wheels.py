"""Which build of PyTorch has kernels for which architecture: package index and image, with source and date, as data.

A build without kernels for a card installs, finds the card, and fails at the first operation; so the doctor compares.
`make` asks core/hardware/choose_torch.py, which reads this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

READ = "2026-11-21"
"""The day on which every source below was last read."""

GENERIC = "https://download.pytorch.org/whl/"
RELEASE = "2.13.0"
"""Release of PyTorch that every test runs on."""


@dataclass(frozen=True, slots=True)
class Build:
    """Where PyTorch for some architectures comes from."""

    arches: tuple[str, ...]
    index: str
    """Package index; empty: no source names one."""
    image: str
    """Container image that has it; empty: no source names one."""
    sources: tuple[str, ...]
    package: str = "torch"
    """With extras; `{arch}` stands for the architecture."""
    release: str = ""
    """The release of PyTorch at that index that eft is written for; empty: it has none, take its newest."""
    newest: str = ""
    """The last ROCm or CUDA whose build has kernels for these, where later ones have not."""
    note: str = ""
    gigabytes: float = 0
    """What pip downloads of it on x86-64, with the libraries that it needs; 0: nobody has measured it."""

    def requirement(self, arch: str) -> str:
        """What pip is to install."""
        package = self.package.format(arch=arch)
        return f"{package}=={self.release}" if self.release else package

    def install(self, arch: str) -> str:
        """The command, for people; empty without an index."""
        return f"pip install '{self.requirement(arch)}' --index-url {self.index}" if self.index else ""


BUILDS = (
    Build(
        ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151",
         "gfx1200", "gfx1201"),
        f"{GENERIC}rocm7.2",
        "rocm/pytorch:rocm10.0_ubuntu24.04_py3.12_pytorch_release_2.13.0",
        (
            "https://github.com/pytorch/pytorch/blob/main/.ci/docker/manywheel/build.sh",
            "https://github.com/pytorch/test-infra/pull/8451",
        ),
        release=RELEASE,
    ),
    Build(
        ("gfx1010", "gfx1011", "gfx1012", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036", "gfx1103",
         "gfx1152", "gfx1153"),
        "https://repo.amd.com/rocm/whl-multi-arch/",
        "",
        (
            "https://github.com/ROCm/pytorch/issues/3518",
            "https://github.com/unslothai/unsloth/pull/9138",
            "https://github.com/unslothai/unsloth/pull/9829",
        ),
        package="torch[device-{arch}]",
        note="PyTorch's own wheels have no kernels for it, or not in every release",
    ),
    Build(
        ("gfx906",),
        f"{GENERIC}rocm6.3",
        "",
        ("https://github.com/unslothai/unsloth/pull/7354", "https://github.com/ROCm/TheRock/issues/1844"),
        newest="ROCm 6.3",
        note="later ROCm libraries have no kernels for it",
    ),
    Build(
        ("gfx900", "gfx902", "gfx90c"),
        "",
        "",
        ("https://github.com/ROCm/TheRock/issues/1844",),
        note="no current build of PyTorch is known to run on it",
    ),
    Build(
        ("sm_70",),
        f"{GENERIC}cu126",
        "pytorch/pytorch:2.13.0-cuda12.6-cudnn9-runtime",
        ("https://github.com/pytorch/pytorch/issues/172352", "https://github.com/pytorch/pytorch/issues/190385"),
        release=RELEASE,
        newest="CUDA 12.6",
        note="the last to have Volta's kernels; from PyTorch 2.15 on it is no longer built",
    ),
    Build(
        ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
        f"{GENERIC}cu130",
        "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
        ("https://github.com/pytorch/pytorch/pull/182849", "https://github.com/pytorch/pytorch/pull/197555"),
        release=RELEASE,
        gigabytes=2.7,
        note="built for 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0; a card runs what was built for a lower minor number",
    ),
    Build(
        ("sm_87",),
        "",
        "",
        ("https://github.com/pytorch/pytorch/pull/182849",),
        note="NVIDIA builds PyTorch for its Jetson boards itself",
    ),
    Build(("cpu",), f"{GENERIC}cpu", "", ("https://pytorch.org/get-started/locally/",), release=RELEASE, gigabytes=0.2),
)  # fmt: skip

_BY_ARCH = {arch: build for build in BUILDS for arch in build.arches}


def lookup(arch: str) -> Build | None:
    """Get the source of PyTorch for `arch`; None if the table does not have it."""
    return _BY_ARCH.get(arch.partition(":")[0])


def misfit(arch: str, built_for: str) -> str | None:
    """Why a PyTorch `built_for` (`ROCm 7.2`, `CUDA 13.0`) has no kernels for `arch`; None where nothing is known
    against it."""
    build = lookup(arch)
    if build is None or not build.newest:
        return None
    newest, has = (re.findall(r"\d+", words) for words in (build.newest, built_for))
    if build.newest.split()[0] != built_for.split()[0] or [int(n) for n in has] <= [int(n) for n in newest]:
        return None
    return f"PyTorch for {built_for} has no kernels for {arch} ({build.note}): `{build.install(arch)}`"
