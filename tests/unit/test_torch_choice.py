"""Which PyTorch is installed: `core.hardware.choose_torch`, the Makefile's TORCH=, and the tables of the two guides."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from core import HOME
from core.docs import install
from core.hardware import choose_torch
from core.hardware.device_mask import Gpu
from core.hardware.discover import Box, discover
from core.hardware.tables import wheels
from core.hardware.tables.arch import ROWS

GENERIC = "https://download.pytorch.org/whl/"


@pytest.mark.parametrize(
    ("kind", "arches", "requirement", "index"),
    [
        ("cpu", [], "torch==2.13.0", f"{GENERIC}cpu"),
        ("rocm", ["gfx942", "gfx1100"], "torch==2.13.0", f"{GENERIC}rocm7.2"),
        ("rocm", ["gfx906"], "torch", f"{GENERIC}rocm6.3"),
        ("rocm", ["gfx1031"], "torch[device-gfx1031]", "https://repo.amd.com/rocm/whl-multi-arch/"),
        ("cuda", ["sm_90"], "torch==2.13.0", f"{GENERIC}cu130"),
        ("cuda", ["sm_70"], "torch==2.13.0", f"{GENERIC}cu126"),
    ],
)
def test_the_build_follows_from_the_cards(
    kind: choose_torch.Kind, arches: list[str], requirement: str, index: str
) -> None:
    build, arch = choose_torch.pick(kind, arches)
    assert (build.requirement(arch), build.index) == (requirement, index)


@pytest.mark.parametrize(
    ("kind", "arches", "words"),
    [
        ("rocm", ["gfx900"], "no current build of PyTorch is known"),
        ("rocm", ["gfx9999"], "no build of PyTorch is known for gfx9999"),
        ("cuda", ["gfx942"], "known for gfx942 with TORCH=cuda"),
        ("rocm", ["gfx906", "gfx942"], "need different builds"),
        ("rocm", ["gfx1031", "gfx1032"], "need different builds"),
        ("cuda", ["sm_70", "sm_90"], "need different builds"),
    ],
)
def test_where_none_fits_it_says_why(kind: choose_torch.Kind, arches: list[str], words: str) -> None:
    with pytest.raises(choose_torch.NoBuild, match=words):
        choose_torch.pick(kind, arches)


def gpu(vendor: Literal["amd", "nvidia"], arch: str) -> Gpu:
    return Gpu(0, vendor, f"GPU-{arch}", "0000:03:00.0", "a card", arch, 1 << 35)


@pytest.mark.parametrize(
    ("gpus", "kind", "words"),
    [
        ([], "cpu", "no GPU was found here"),
        ([("amd", "gfx942:sramecc+")], "rocm", "for gfx942 of this box"),
        ([("nvidia", "sm_90"), ("nvidia", "sm_90")], "cuda", "for sm_90 of this box"),
        ([("amd", "gfx900")], "cpu", "no current build of PyTorch is known"),
    ],
)
def test_the_kind_follows_from_the_box(gpus: list[tuple[Literal["amd", "nvidia"], str]], kind: str, words: str) -> None:
    box = Box([gpu(vendor, arch) for vendor, arch in gpus], [])
    chosen, arches, told = choose_torch.automatic(box)
    assert chosen == kind and words in told
    assert choose_torch.pick(chosen, arches)


def test_of_two_makers_a_person_names_one() -> None:
    with pytest.raises(choose_torch.NoBuild, match="TORCH=rocm or TORCH=cuda"):
        choose_torch.automatic(Box([gpu("amd", "gfx942"), gpu("nvidia", "sm_90")], []))


def test_it_runs_before_anything_is_installed() -> None:
    """Isolated from site-packages, as on a machine with a bare Python."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "core.hardware.choose_torch", "rocm", "--arch", "gfx1100"],
        cwd=HOME, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"torch==2.13.0 {GENERIC}rocm7.2 rocm\n"
    assert f"read {wheels.READ}" in done.stderr and "https://github.com/pytorch" in done.stderr, "date and source"


def test_the_guides_have_every_architecture() -> None:
    for page, vendor in ((install.rocm(), "amd"), (install.cuda(), "nvidia")):
        rows = set(re.findall(r"^\| `((?:gfx|sm_)\w+)` \|", page, re.MULTILINE))
        assert rows == {row.arch for row in ROWS if row.vendor == vendor}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make` needs of this checkout, and an environment whose Python writes down what pip is asked."""
    for name in ("locks", "core/hardware"):
        shutil.copytree(HOME / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "core/__init__.py", "core/errors.py", "client/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(HOME / name, tmp_path / name)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\ncase "$*" in *install*require-hashes*|*install*client|*check|*versions*) ;; '
        f'*) printf "%s\\n" "$*" >> {tmp_path}/asked ;; esac\n'
        f'case "$*" in *index-url*) ! test -e {tmp_path}/cut-off ;; esac\n'
    )
    python.chmod(0o755)
    return tmp_path


def make(checkout: Path, *words: str) -> list[str]:
    """What pip was asked for by `make .venv/.app …`."""
    (checkout / "asked").write_text("")
    environment = {name: value for name, value in os.environ.items() if name not in ("TORCH", "TORCH_INDEX", "ARCH")}
    done = subprocess.run(
        ["make", "-s", ".venv/.app", f"PYTHON={sys.executable}", *words],
        cwd=checkout, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(words, done.returncode, done.stderr)  # pytest shows it where the test fails
    return [line.partition(" -qq ")[2] for line in (checkout / "asked").read_text().splitlines()]


def test_make_installs_what_was_asked_for_and_remembers_it(checkout: Path) -> None:
    cpu = f"install --index-url {GENERIC}cpu torch==2.13.0"
    assert make(checkout, "TORCH=torch==2.13.0") == ["install torch==2.13.0"]
    assert make(checkout) == []
    assert make(checkout, "TORCH=cpu") == ["uninstall -y torch", cpu], "2.13.0+cu130 would do for torch==2.13.0"
    assert make(checkout, "TORCH=cpu") == []
    later = (checkout / ".venv/.app").stat().st_mtime + 1  # some clocks of files tick slower than make runs
    os.utime(checkout / "locks/app.txt", (later, later))
    assert make(checkout) == [cpu], "a later make keeps the choice"
    assert make(checkout, "TORCH=rocm", "ARCH=gfx900") == [], "what there is stays when there is none"
    assert make(checkout, "TORCH=ROCM") == make(checkout, "TORCH=amd") == [], "a package of PyPI that has that name"
    assert make(checkout, "TORCH=torch==2.12.0", "TORCH_INDEX=https://example.org/whl") == [
        "uninstall -y torch",
        "install --index-url https://example.org/whl torch==2.12.0",
    ]


@pytest.mark.skipif(choose_torch.automatic(discover(environ={}))[0] != "cpu", reason="this box has a GPU")
def test_make_takes_the_build_for_the_cpu_where_there_is_no_gpu(checkout: Path) -> None:
    assert make(checkout) == [f"install --index-url {GENERIC}cpu torch==2.13.0"]
    assert make(checkout, "TORCH=cpu") == [], "it is remembered as that"


@pytest.mark.skipif(choose_torch.automatic(discover(environ={}))[0] != "cpu", reason="this box has a GPU")
def test_make_takes_pypis_where_that_index_is_out_of_reach(checkout: Path) -> None:
    (checkout / "cut-off").touch()
    named = f"install --index-url {GENERIC}cpu torch==2.13.0"
    assert make(checkout, "TORCH=cpu") == ["uninstall -y torch", named], "not where it was named"
    assert make(checkout) == ["install torch==2.13.0"], "pip was not sent to an index that does not answer"
    assert make(checkout, "TORCH=torch==2.13.0") == [], "it is remembered as that"


def test_make_replaces_the_torch_of_an_older_checkout(checkout: Path) -> None:
    (checkout / ".venv/.app").touch()
    assert make(checkout) == []
    rocm = f"install --index-url {GENERIC}rocm7.2 torch==2.13.0"
    assert make(checkout, "TORCH=rocm", "ARCH=gfx1100") == ["uninstall -y torch", rocm]
