"""16-bit products and attention through float32: torch's results but for rounding, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.train.kernels import float32
from core.train.kernels.float32 import FEW, LARGE, SMALL, through_float32

pytestmark = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="torch then has no such kernels")


class Summed(torch.autograd.Function):
    """Twice a layer's result; the gradients of the hidden states are summed in place, as those of q, k and v are."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return (hidden.flatten(0, 1) @ weight.t()).addmm_(hidden.flatten(0, 1), weight.t()).view(*hidden.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        of_weight = rows.t() @ hidden.flatten(0, 1)
        return (rows @ weight).addmm_(rows, weight).view_as(hidden), of_weight.addmm_(rows.t(), hidden.flatten(0, 1))


def computed(dtype: torch.dtype, masked: bool) -> list[Tensor]:
    """A layer, one with a bias, and attention; their results and gradients, in float32."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()

    hidden, weight, bias = drawn(2, 80, 96), drawn(128, 96), drawn(128)
    narrow, back = drawn(4, 96), drawn(128, 4)  # LoRA's
    query, key, value = drawn(1, 4, 70, 64), drawn(1, 2, 70, 64), drawn(1, 2, 70, 64)
    mask = torch.ones(70, 70, dtype=torch.bool).tril() if masked else None
    results = [
        functional.linear(hidden, weight),
        functional.linear(hidden, weight, bias),
        functional.linear(functional.linear(hidden, narrow), back),
        Summed.apply(hidden, weight),
        functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=True
        ),
    ]
    gradients = torch.autograd.grad(
        sum(result.square().sum() for result in results), (hidden, weight, bias, narrow, back, query, key, value)
    )
    return [tensor.detach().float() for tensor in (*results, *gradients)]


@pytest.mark.parametrize("masked", [False, True])
def test_results_are_as_near_to_the_exact_ones_as_torchs(masked: bool) -> None:
    exact, theirs = computed(torch.float64, masked), computed(torch.bfloat16, masked)
    with through_float32(True):
        ours = computed(torch.bfloat16, masked)
    for here, there, right in zip(ours, theirs, exact, strict=True):
        scale = right.abs().max()
        assert (here - right).abs().max() <= max(1.5 * (there - right).abs().max(), 2**-8 * scale)


def test_kernels_of_other_dtypes_and_sizes_are_torchs_own_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(100, 100, generator=generator)
    narrow = torch.randn(FEW // SMALL + 100, SMALL - 1, generator=generator).bfloat16()
    there = wide @ wide, narrow.t() @ narrow, *computed(torch.float32, masked=True)
    with through_float32(True):
        here = wide @ wide, narrow.t() @ narrow, *computed(torch.float32, masked=True)
    assert all(torch.equal(one, other) for one, other in zip(here, there, strict=True))
    large = torch.empty(1, dtype=torch.bfloat16).expand(LARGE // SMALL + 1, SMALL)
    assert not float32._worth_it(large.t(), large)
    few = torch.empty(1, dtype=torch.bfloat16).expand(FEW // 4, 4)
    assert float32._worth_it(few, few.t()) and not float32._worth_it(few.float(), few.t())


def test_a_large_second_operand_is_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an output head's: logits [rows, vocabulary] into a buffer, and the hidden states' gradients from theirs."""
    monkeypatch.setattr(float32, "LARGE", 1 << 14)
    monkeypatch.setattr(float32, "PART", 1 << 12)
    generator = torch.Generator().manual_seed(7)
    rows, head = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((70, 64), (333, 64)))
    logits = torch.full((70, 333), torch.nan, dtype=torch.bfloat16)
    added = torch.randn(70, 64, generator=generator).bfloat16()
    fresh, summed = torch.full_like(added, torch.nan), added.clone()
    with through_float32(True):
        torch.mm(rows, head.t(), out=logits)
        returned = rows @ head.t()
        fresh.addmm_(logits, head, beta=0, alpha=0.25)
        summed.addmm_(logits, head, beta=0.5, alpha=2.0)
        back = logits @ head
    exact, wide = rows.double() @ head.double().t(), logits.double() @ head.double()
    pairs = [(logits, exact), (returned, exact), (fresh, wide / 4), (summed, added.double() / 2 + wide * 2)]
    for here, right in [*pairs, (back, wide)]:
        assert here.dtype is torch.bfloat16
        torch.testing.assert_close(here.double(), right, rtol=2**-8, atol=2**-8 * float(right.abs().mean()))


def test_torchs_kernels_are_back_afterwards() -> None:
    before = computed(torch.bfloat16, masked=False)
    with pytest.raises(ZeroDivisionError), through_float32(True):
        inside = computed(torch.bfloat16, masked=False)
        raise ZeroDivisionError
    after = computed(torch.bfloat16, masked=False)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(before, inside, strict=True))
