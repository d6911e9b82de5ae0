"""The Triton products of few rows with a packed weight, interpreted, against torch.

Stated tolerance, as a share of y's norm: 1e-6 from the exact product of the unpacked float32 weight, and y's own
rounding (0.3 % in bfloat16); from unpacking in x's dtype and multiplying, 1e-6 in float32, 0.2 % in float16, 1 % in
bfloat16, most of which is how far that is from the exact product itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.train.quant.int8 import quantize_int8
from core.train.quant.nf4 import quantize_nf4
from tests.support.dequantize import dequantize
from tests.support.interpreter import Run
from tests.support.selection import pairwise

EXACT = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 3e-3}
DENSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def _weight(form: str, n: int, k: int, seed: int = 0) -> tuple[Any, Tensor]:
    """Packed, and unpacked in float32."""
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    values.view(-1)[: min(64, n * k // 2)] = 0.0
    if form == "int8":
        int8 = quantize_int8(values)
        return int8, dequantize(int8, torch.float32)
    nf4 = quantize_nf4(values, 256 if form == "nf4-256" else 64, double=form != "nf4-single")
    return nf4, dequantize(nf4, torch.float32)


def _product(run: Run, x: Tensor, weight: Any, form: str, bias: Tensor | None = None) -> Tensor:
    format, n = form.partition("-")[0], weight.shape[0]
    where = "core.train.kernels.interface:few_rows_with"
    y = run(where, "triton", x, weight.packed, weight.scales, format, weight.block, n, bias)[0]
    assert y is not None and y.dtype == x.dtype
    return y  # type: ignore[no-any-return]


def _off(ours: Tensor, wanted: Tensor) -> float:
    return ((ours.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize(
    ("form", "k", "rows"),
    pairwise(
        ["nf4", "nf4-single", "nf4-256", "int8"],
        [2, 64, 96, 1000, 2304, 4096],
        [(1, torch.bfloat16), (3, torch.float32), (4, torch.float16), (8, torch.bfloat16)],
    ),
)
def test_is_the_product(interpreted: Run, form: str, k: int, rows: tuple[int, torch.dtype]) -> None:
    """Widths that blocks do not divide, columns that programs do not, with a bias and without."""
    weight, dense = _weight(form, 7, k)
    generator = torch.Generator().manual_seed(k)
    m, dtype = rows
    x = torch.randn(m, k, generator=generator).to(dtype)
    bias = torch.randn(7, generator=generator) if m % 2 else torch.zeros(7)
    y = _product(interpreted, x, weight, form, bias if m % 2 else None)
    assert _off(y, torch.nn.functional.linear(x.double(), dense.double(), bias.double())) < EXACT[dtype]
    assert _off(y, torch.nn.functional.linear(x, dense.to(dtype), bias.to(dtype))) < DENSE[dtype]


@settings(max_examples=30, deadline=None)
@given(
    m=st.integers(1, 8), n=st.integers(1, 9), half=st.integers(1, 300), form=st.sampled_from(["nf4", "int8"]),
    seed=st.integers(0, 2**32), scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)  # fmt: skip
def test_any_shape_and_size(interpreted: Run, m: int, n: int, half: int, form: str, seed: int, scale: float) -> None:
    weight, dense = _weight(form, n, 2 * half, seed)
    x = torch.randn(m, 2 * half, generator=torch.Generator().manual_seed(seed + 1)) * scale
    wanted = x.double() @ dense.double().t()
    bound = x.double().abs() @ dense.double().abs().t() * 2e-6  # of a sum whose terms cancel
    assert ((_product(interpreted, x, weight, form).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_row_is_its_own_and_the_same_at_every_call(interpreted: Run, form: str) -> None:
    """A row of y depends on that row of x alone: to the bit in whatever company, and not on one that is no number."""
    weight, _ = _weight(form, 9, 320)
    x = torch.randn(3, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = _product(interpreted, x, weight, form)
    assert torch.equal(y, _product(interpreted, x, weight, form))
    assert torch.equal(y[:1], _product(interpreted, x[:1], weight, form))
    x[1, 5] = float("nan")
    broken = _product(interpreted, x, weight, form)
    assert broken[1].isnan().all() and torch.equal(broken[[0, 2]], y[[0, 2]])


def test_of_a_weight_of_zeros_the_bias_is_left(interpreted: Run) -> None:
    zeros = torch.zeros(5, 128)
    for form, weight in (("nf4", quantize_nf4(zeros, double=False)), ("int8", quantize_int8(zeros))):
        bias = torch.arange(5.0)
        y = _product(interpreted, torch.full((2, 128), 1e30), weight, form, bias)
        assert torch.equal(y, bias.expand(2, 5))


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_rows_of_the_weight_past_2_to_the_31(interpreted: Run, format: str) -> None:
    interpreted("tests.support.interpreted:last_columns", format)
