"""Every row of the architecture table, against a second list written by hand."""

from __future__ import annotations

import pytest

from core.hardware.tables.arch import ROWS, gfx_name, lookup, precision, supports_bf16

BF16 = {
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152",
    "gfx1153", "gfx1200", "gfx1201", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120",
    "sm_121", "cpu",
}  # fmt: skip
NO_BF16 = {
    "gfx900", "gfx902", "gfx906", "gfx90c", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031", "gfx1032", "gfx1033",
    "gfx1034", "gfx1035", "gfx1036", "sm_70", "sm_75",
}  # fmt: skip
FP8 = {"gfx942": "fnuz"} | dict.fromkeys(
    ["gfx950", "gfx1200", "gfx1201", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"], "ocp"
)
LOCAL_MEMORY = {  # KiB; 64 for AMD but one
    "gfx950": 160, "sm_70": 96, "sm_75": 64, "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227,
    "sm_100": 227, "sm_103": 227, "sm_120": 99, "sm_121": 99, "cpu": 0,
}  # fmt: skip


ATTENTION = {  # else math for AMD, flash for NVIDIA
    "gfx90a": "flash", "gfx942": "flash", "gfx950": "flash", "gfx1100": "flash", "gfx1101": "opt_in",
    "gfx1102": "opt_in", "gfx1103": "opt_in", "gfx1150": "opt_in", "gfx1151": "flash", "gfx1152": "opt_in",
    "gfx1153": "opt_in", "gfx1200": "opt_in", "gfx1201": "flash", "sm_70": "efficient", "sm_75": "efficient",
}  # fmt: skip
PREDECESSOR = {  # DLM's table of supported GPUs: eleven architectures, and which of them it let train in bf16
    "gfx90a": True, "gfx942": True, "gfx1100": True, "gfx1101": True, "gfx1102": True, "gfx1200": True, "gfx1201": True,
    "gfx1030": False, "gfx1031": False, "gfx908": False, "gfx906": False,
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arch)
def test_row(row: object) -> None:
    from core.hardware.tables.arch import ArchRow

    assert isinstance(row, ArchRow)
    assert lookup(row.arch) is row
    assert row.arch in BF16 | NO_BF16
    assert supports_bf16(row.arch) is (row.arch in BF16)
    assert row.fp8 == FP8.get(row.arch, "none")
    assert row.lds_kib == LOCAL_MEMORY.get(row.arch, 64)
    assert row.attention == ATTENTION.get(row.arch, "math" if row.vendor == "amd" else "flash")
    assert row.precision == ("bf16" if row.bf16 else "fp16")
    match row.vendor:
        case "amd":
            # Matrix instructions came with CDNA 1 and RDNA 3, and bf16 with them.
            family = "mfma" if row.arch.startswith("gfx9") else "wmma"
            assert row.matrix == (family if row.bf16 else "none")
            assert row.arch.startswith("gfx")
            assert row.wave_size == (64 if row.arch.startswith("gfx9") else 32)
        case "nvidia":
            assert row.arch.startswith("sm_") and row.wave_size == 32 and row.matrix == "tensor"
        case "cpu":
            assert row.arch == "cpu" and row.wave_size == 1
    assert row.examples


def test_every_arch_once() -> None:
    assert len({row.arch for row in ROWS}) == len(ROWS) == len(BF16 | NO_BF16)


def test_the_predecessors_eleven_rows() -> None:
    assert len(PREDECESSOR) == 11
    for arch, bf16 in PREDECESSOR.items():
        row = lookup(arch)
        # gfx908 has bf16 matrix instructions (MFMA of CDNA 1): the predecessor did not use them.
        assert row is not None and row.bf16 is (bf16 or arch == "gfx908")
        assert precision(arch) == ("bf16" if row.bf16 else "fp16")


def test_feature_suffixes_are_ignored() -> None:
    assert lookup("gfx90a:sramecc+:xnack-") is lookup("gfx90a")
    assert supports_bf16("gfx942:sramecc+:xnack-")


@pytest.mark.parametrize("arch", ["gfx1300", "sm_200", "", "gfx"])
def test_unknown(arch: str) -> None:
    assert lookup(arch) is None and not supports_bf16(arch) and precision(arch) == "fp32"


@pytest.mark.parametrize(
    ("number", "name"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (90012, "gfx90c"), (100306, "gfx1036"),
     (110000, "gfx1100"), (110501, "gfx1151"), (120001, "gfx1201")],
)  # fmt: skip
def test_gfx_name(number: int, name: str) -> None:
    assert gfx_name(number) == name
