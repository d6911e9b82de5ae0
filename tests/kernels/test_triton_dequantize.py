"""The Triton kernels that unpack, interpreted: the bits of the portable backend and of bitsandbytes."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.train.kernels import portable
from core.train.quant.int8 import quantize_int8
from core.train.quant.layout import dynamic_map
from core.train.quant.nf4 import quantize_nf4
from tests.support.interpreter import Run
from tests.support.selection import pairwise

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = st.sampled_from([0.0, -0.0, 1e-45, 3e-39, 1.2e-38, 1e-8, 0.02, 1.0, 6e4, 7e4, 3e30, 3.3e38])
"""Nothing, the smallest there is, subnormal, usual, past float16's range, next to float32's."""


def _unpacked(run: Run, packed: Tensor, scales: list[Tensor], format: str, block: int, n: int, dtype: Any) -> Tensor:
    out = torch.full((n,), 7.0, dtype=dtype)
    where = f"core.train.kernels.triton.{format}:dequantize_into"
    return run(where, out, packed, scales, block)[1][0]  # type: ignore[no-any-return]


def _portable(packed: Tensor, scales: list[Tensor], format: str, block: int, n: int, dtype: Any) -> Tensor:
    out = torch.empty(n, dtype=dtype)
    portable.dequantize_into(out, packed, scales, format, block)
    return out


def _same(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("quantised", "n", "dtype"),
    pairwise(
        ["nf4", "nf4-single", "nf4-32", "nf4-4096", "int8"],
        [1, 2, 33, 64, 2047, 2048, 2049, 64 * 257 + 37, 64 * 256 * 2],
        DTYPES,
    ),
)
def test_same_bits_as_portable(interpreted: Run, quantised: str, n: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).pow(8)
    values[: n // 4] = 0.0
    format, _, form = quantised.partition("-")
    block = int(form) if form.isdigit() else 64
    weight: Any = quantize_int8(values) if format == "int8" else quantize_nf4(values, block, double=form != "single")
    ours = _unpacked(interpreted, weight.packed, weight.scales, format, block, n, dtype)
    _same(ours, _portable(weight.packed, weight.scales, format, block, n, dtype))


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpacks_what_bitsandbytes_packs(interpreted: Run, double: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(96, 192, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    weight.view(-1)[64:192], weight.view(-1)[5] = 0.0, 1.0
    packed, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    scales = [state.absmax, state.state2.absmax, state.state2.code, state.offset] if double else [state.absmax]
    ours = _unpacked(interpreted, packed, scales, "nf4", 64, weight.numel(), dtype)
    assert torch.equal(ours.view(96, 192), bnb.dequantize_4bit(packed, state))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(1, 700), dtype=st.sampled_from(DTYPES))
def test_any_bytes_and_scales(interpreted: Run, data: st.DataObject, n: int, dtype: torch.dtype) -> None:
    """Whatever a file holds: not only what our own quantisation makes of a weight."""
    blocks = -(-n // 64)

    def some(count: int, high: int) -> Tensor:
        seed = data.draw(st.integers(0, 2**32))
        return torch.randint(0, high, (count,), generator=torch.Generator().manual_seed(seed))

    def scale(count: int) -> Tensor:
        return torch.tensor(data.draw(st.lists(FLOATS, min_size=count, max_size=count)))

    packed = some(-(-n // 2), 256).to(torch.uint8)
    double = [some(blocks, 256).to(torch.uint8), scale(1), dynamic_map(torch.device("cpu")), scale(1)[0]]
    for scales in (double, [scale(blocks)]):
        ours = _unpacked(interpreted, packed, scales, "nf4", 64, n, dtype)
        _same(ours, _portable(packed, scales, "nf4", 64, n, dtype))
    signed, scales = (some(n, 256) - 128).to(torch.int8), [scale(blocks)]
    ours = _unpacked(interpreted, signed, scales, "int8", 64, n, dtype)
    _same(ours, _portable(signed, scales, "int8", 64, n, dtype))


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_places_past_2_to_the_31(interpreted: Run, format: str) -> None:
    """The last program of a weight of 2³¹ + 100 elements, in memory that is never touched but for its ends."""
    n = 2**31 + 100
    interpreted("tests.support.interpreted:last_of", format, n)
