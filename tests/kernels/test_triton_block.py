"""Triton's norms, gated activations and rotary embedding, interpreted on the CPU: the C kernels' results, and those of
float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.interpreted import parts_of_a_block, turned_heads
from tests.support.interpreter import Run

WHERE = "tests.support.interpreted:parts_of_a_block"
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-6}
"""One rounding of the dtype, of the largest value; float32: what a sum in another order makes."""


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(shape[-1])
    x, y, above = (torch.randn(*shape, generator=draw).mul_(3).to(dtype) for _ in range(3))
    return x, y, torch.randn(shape[-1], generator=draw).to(dtype), above


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 1), (5, 7, 63), (33, 200), (2, 4099)], ids=str)
def test_they_compute_what_the_c_kernels_do(interpreted: Run, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Stated tolerance: one rounding. In bfloat16 at most one value in a hundred differs at all."""
    given = inputs(dtype, *shape)
    (backend, found), _ = interpreted(WHERE, *given)
    ours, wanted = parts_of_a_block(*given)
    assert (backend, ours) == ("triton", "native")
    for one, other in zip(found, wanted, strict=True):
        gap = (one.double() - other.double()).abs()
        assert one.dtype == dtype and one.shape == other.shape
        assert float(gap.max()) <= ROUNDING[dtype] * float(other.double().abs().max())
        if dtype == torch.bfloat16 and gap.numel() > 1000:
            assert float((gap > 0).double().mean()) <= 1e-2


def test_float16_is_that_of_float64(interpreted: Run) -> None:
    """Stated tolerance: four roundings of the largest value."""
    x, y, weight, above = inputs(torch.float16, 9, 96)
    (_, found), _ = interpreted(WHERE, x, y, weight, above)
    a, b = x.double().requires_grad_(), y.double().requires_grad_()
    normed = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = []
    for out, leaves in (
        (normed * weight.double(), [a]), (normed * (1.0 + weight.double()), [a]), (functional.silu(a) * b, [a, b]),
    ):  # fmt: skip
        wanted += [out, *torch.autograd.grad(out, leaves, above.double(), retain_graph=True)]
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).detach().abs().max()) <= 2.0**-9 * float(other.detach().abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "lines_of_angles", "width"), [(3, 1, 64), (1, 2, 10)])
def test_turned_heads_are_those_of_c_to_the_bit(
    interpreted: Run, dtype: torch.dtype, heads: int, lines_of_angles: int, width: int
) -> None:
    draw = torch.Generator().manual_seed(width)
    x, above = (torch.randn(2, 7, heads, width, generator=draw).to(dtype).transpose(1, 2) for _ in range(2))
    angles = torch.randn(lines_of_angles, 7, width, generator=draw)
    given = x, angles.cos().to(dtype), angles.sin().to(dtype), above
    (backend, found), _ = interpreted("tests.support.interpreted:turned_heads", *given)
    ours, wanted = turned_heads(*given)
    assert (backend, ours) == ("triton", "native")
    assert all(map(torch.equal, found, wanted))


def test_rows_past_element_2_to_the_31(interpreted: Run) -> None:
    interpreted("tests.support.interpreted:last_rows", 4096)


def test_what_is_not_a_number_stays_that(interpreted: Run) -> None:
    x = torch.ones(3, 70, dtype=torch.bfloat16)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    ones = torch.ones(70, dtype=torch.bfloat16)
    (_, found), _ = interpreted(WHERE, x, x, ones, torch.ones_like(x))
    for out in (found[0], found[2], found[4]):
        assert bool(out[0].isfinite().all()) and bool(out[1, 5].isnan()) and not bool(out[2, 6].isfinite())
