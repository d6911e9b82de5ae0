"""16-bit products and attention through float32: torch's results but for rounding, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.train.kernels import float32
from core.train.kernels.float32 import FEW, LARGE, SHORT, SMALL, TINY, Route, through_float32

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
@pytest.mark.parametrize("route", [Route.EVERYTHING, Route.SMALL])
def test_results_are_as_near_to_the_exact_ones_as_torchs(route: Route, masked: bool) -> None:
    exact, theirs = computed(torch.float64, masked), computed(torch.bfloat16, masked)
    with through_float32(route):
        ours = computed(torch.bfloat16, masked)
    for here, there, right in zip(ours, theirs, exact, strict=True):
        scale = right.abs().max()
        assert (here - right).abs().max() <= max(1.5 * (there - right).abs().max(), 2**-8 * scale)


def test_kernels_of_other_dtypes_and_sizes_are_torchs_own_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(100, 100, generator=generator)
    narrow = torch.randn(FEW // SMALL + 100, SMALL - 1, generator=generator).bfloat16()
    there = wide @ wide, narrow.t() @ narrow, *computed(torch.float32, masked=True)
    with through_float32(Route.EVERYTHING):
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
    with through_float32(Route.EVERYTHING):
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


def test_gradients_alone_of_short_rows_are_computed_otherwise() -> None:
    def attention(tokens: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(9)
        drawn = [torch.randn(1, 2, tokens, 64, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
        result = functional.scaled_dot_product_attention(drawn[0], drawn[1], drawn[2], is_causal=True)
        return [result.detach(), *torch.autograd.grad(result.float().square().sum(), drawn)]

    short, long = SHORT // 64, SHORT // 64 + 1
    before = {tokens: attention(tokens) for tokens in (short, long)}
    with through_float32(Route.GRADIENTS):
        within = {tokens: attention(tokens) for tokens in (short, long)}
    assert torch.equal(before[short][0], within[short][0])
    assert not any(torch.equal(one, other) for one, other in zip(before[short][1:], within[short][1:], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before[long], within[long], strict=True))


def test_small_products_alone_are_computed_otherwise() -> None:
    generator = torch.Generator().manual_seed(11)
    one, other = torch.randn(TINY // 64, 64, generator=generator).bfloat16(), torch.randn(64, 64).bfloat16()
    there = [torch.mm(one, other), torch.mm(torch.cat([one, one[:1]]), other), torch.mm(one[:64], one[:65].t())]
    used: list[str] = []

    def seen(name: str, make: Any) -> Any:
        def with_note(kernel: Any, **more: Any) -> Any:
            def noted(*args: Any, **options: Any) -> Any:
                used.append(f"{name} of {args[0].dtype}")
                return kernel(*args, **options)

            return make(noted, **more)

        return with_note

    table = {name: seen(name, make) for name, make in float32.REPLACED[Route.SMALL].items()}
    with float32.replaced({name: make(float32.torch_kernel(name, "CPU")) for name, make in table.items()}, "CPU"):
        here = [torch.mm(one, other), torch.mm(torch.cat([one, one[:1]]), other), torch.mm(one[:64], one[:65].t())]
    assert used == ["mm of torch.float32", "mm of torch.bfloat16", "mm of torch.float32"]
    for mine, theirs in zip(here, there, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2**-7, atol=2**-7)


def test_torchs_kernels_are_back_afterwards() -> None:
    before = computed(torch.bfloat16, masked=False)
    with pytest.raises(ZeroDivisionError), through_float32(Route.EVERYTHING):
        inside = computed(torch.bfloat16, masked=False)
        raise ZeroDivisionError
    after = computed(torch.bfloat16, masked=False)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(before, inside, strict=True))
