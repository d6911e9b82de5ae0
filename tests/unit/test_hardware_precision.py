"""In which precision a run computes, over all architectures, wishes and outcomes of a self-test."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import pytest

from core.errors import SpecError
from core.hardware.precision import TF32, Wanted, choose_precision
from core.hardware.selftest import DTYPES
from core.hardware.tables.arch import ROWS

SUBSETS = [subset for size in range(4) for subset in combinations(DTYPES, size)]


@pytest.mark.parametrize("wanted", get_args(Wanted))
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arch)
def test_what_was_asked_for_or_less_and_never_in_silence(row: object, wanted: Wanted) -> None:
    for usable in SUBSETS:
        for fast in (True, False):
            try:
                chosen, notice = choose_precision(wanted, row.arch, fast_bf16=fast, usable=usable)  # type: ignore[attr-defined]
            except SpecError as error:
                assert error.field == "training.precision"
                assert "fp32" not in usable, "float32 is always left where it is right"
                continue
            assert chosen in usable
            first = wanted if wanted != "auto" else "bf16"
            assert (notice is None) == (chosen == first)
            assert notice is None or f"computing in {chosen}" in notice
            if wanted == "fp32":
                assert chosen == "fp32"
            if chosen == "bf16":
                assert fast or row.arch == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wanted", "arch", "fast", "usable", "chosen", "words"),
    [
        ("auto", "gfx906", False, DTYPES, "fp16", "gfx906 has no bf16: computing in fp16"),
        ("bf16", "sm_75", False, DTYPES, "fp16", "sm_75 has no bf16"),
        ("auto", "gfx942", True, ("fp16", "fp32"), "fp16", "bf16 failed this device's self-test"),
        ("auto", "gfx942", True, ("fp32",), "fp32", "fp16 failed this device's self-test"),
        ("auto", "gfx9999", False, DTYPES, "fp32", "nothing is known of gfx9999"),
        ("fp16", "gfx9999", False, DTYPES, "fp16", None),
        ("auto", "cpu", False, DTYPES, "fp32", "fp16 is no faster on a CPU"),
        ("bf16", "cpu", False, DTYPES, "bf16", None),
        ("fp16", "cpu", False, DTYPES, "fp16", None),
    ],
)
def test_rows(wanted: Wanted, arch: str, fast: bool, usable: tuple[str, ...], chosen: str, words: str | None) -> None:
    found, notice = choose_precision(wanted, arch, fast_bf16=fast, usable=usable)
    assert found == chosen
    assert notice is None if words is None else words in (notice or "")


def test_tf32_is_known_of_architectures_of_the_table() -> None:
    assert {row.arch for row in ROWS} > TF32
    assert {row.arch for row in ROWS if row.vendor == "nvidia" and row.bf16} == {a for a in TF32 if a.startswith("sm_")}
