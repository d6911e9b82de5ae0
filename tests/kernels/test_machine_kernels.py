"""Every Triton kernel, executed from the machine code that it is compiled to for four AMD GPUs.

The public functions are called as a run calls them; Triton compiles for the target; tests/support/machine executes the
instructions. Each case of the table of compiled kernels is executed in that very form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from core.train.kernels.triton.compiled import table
from tests.support.machine_process import machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
Run = Callable[..., Any]
KERNELS = "tests.support.machine.kernels"
CASES = list(dict.fromkeys(row.case for row in table.read()))
"""Of the table of compiled kernels."""
MORE = [
    "nf4, one number", "nf4, ragged by 37", "nf4 in blocks of 32", "int8 to float32, ragged by 1",
    "gemv nf4, 5 rows of 9 columns, bias", "gemv nf4, rows that begin within a block",
    "gemv int8, 3 rows of 7 columns, ragged", "loss, a small vocabulary", "loss float32, every option",
    "loss, numbers that are none", "norm, rows of 63", "norm float32, rows of 577, gradient",
    "gate float32, ragged by 1", "gate, 33 numbers, gradient", "turn, 3 heads of 14, angles of each line",
    "turn float32, 5 heads of 6, gradient",
]  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with machine() as run:
        yield run


@pytest.mark.parametrize("target", table.EXECUTED)
def test_every_kernel_of_the_table_computes_the_right_numbers(run: Run, target: str) -> None:
    wrong, executed = run(f"{KERNELS}:execute", target, CASES)
    assert not wrong
    assert sum(executed.values()) > 5_000


@pytest.mark.parametrize("target", table.EXECUTED)
def test_ragged_ends_and_forms_that_the_table_does_not_have(run: Run, target: str) -> None:
    assert not run(f"{KERNELS}:execute", target, MORE)[0]


@pytest.mark.parametrize("target", table.EXECUTED)
def test_what_is_executed_is_the_code_of_the_table(run: Run, target: str) -> None:
    """A case of a new kernel fails here until it has a launch in tests/support/machine/kernels.py."""
    assert not run(f"{KERNELS}:other_forms", target)


@pytest.mark.parametrize("target", ["gfx90a", "gfx942"])
def test_arguments_are_read_from_memory_where_the_hardware_has_not_loaded_them(run: Run, target: str) -> None:
    """gfx90a and gfx942 enter a kernel at one place or another, by their firmware."""
    cases = ["nf4 to bfloat16", "gemv int8, 1 row", "loss bfloat16"]
    assert not run(f"{KERNELS}:execute", target, cases, preload=False)[0]
