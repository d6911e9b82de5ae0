"""In what the chunked loss computes: operands of its products, what arrives from above, and log-probabilities that are
compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from core.train.kernels.interface import Backend
from core.train.loss import chunk
from core.train.loss.linear_cross_entropy import (
    HeadOptions,
    linear_cross_entropy,
    token_figures,
    token_logprobs,
)
from tests.support.selection import pairwise
from tests.support.whole_logits import OPTIONS, row_losses

ROWS, WIDTH, VOCABULARY = 64, 128, 1000
BACKENDS: list[Backend] = ["portable", "native"]


class Products(TorchDispatchMode):
    """Dtypes of the operands of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.seen |= {each.dtype for each in args if isinstance(each, Tensor)}
        return func(*args, **(kwargs or {}))


def inputs(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head whose logits are spread as a model's are, labels."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, WIDTH, generator=draw)
    head = torch.randn(VOCABULARY, WIDTH, generator=draw) * 0.4
    return hidden.to(dtype), head.to(dtype), torch.randint(0, VOCABULARY, (ROWS,), generator=draw)


def slope(found: Tensor, wanted: Tensor) -> float:
    """The factor by which `found` is longer than `wanted` along it."""
    return float((found.double() * wanted.double()).sum() / wanted.double().square().sum())


# --- what arrives from above -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("items", [7, 1000, 1027, 1279, 2051, 3333, 5000])
def test_the_divisor_keeps_all_its_digits(items: int, backend: Backend) -> None:
    """1 / items has no bfloat16: rounded to one it would scale every gradient of the step by up to 0.4 %."""
    hidden, head, labels = inputs(torch.bfloat16)
    exact = hidden.float().requires_grad_()
    (wanted,) = torch.autograd.grad(
        functional.cross_entropy(exact @ head.float().t(), labels, reduction="sum") / items, exact
    )
    ours = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(ours, head, labels, upstream=1 / items, chunk_rows=24, backend=backend) / items
    (found,) = torch.autograd.grad(loss, ours)
    assert found.dtype == torch.bfloat16
    assert slope(found, wanted) == pytest.approx(1.0, abs=2e-4)
    counted = linear_cross_entropy(ours, head, labels, count=items, chunk_rows=24, backend=backend)
    assert torch.equal(torch.autograd.grad(counted, ours)[0], found)


def test_what_arrives_at_a_token_keeps_all_its_digits() -> None:
    hidden, head, labels = inputs(torch.bfloat16)
    ours = hidden.clone().requires_grad_()
    found = token_logprobs(ours, head, labels, chunk_rows=24)
    (whole,) = torch.autograd.grad(found, ours, torch.ones(ROWS), retain_graph=True)
    for factor in (1 / 1027, -1 / 3333, 0.3):
        (each,) = torch.autograd.grad(found, ours, torch.full((ROWS,), factor), retain_graph=True)
        assert slope(each, whole.double() * factor) == pytest.approx(1.0, abs=2e-4)


def test_small_slopes_of_fp16_do_not_vanish() -> None:
    """Tokens that the model is all but sure of: the slopes at the other 20,000 are below the smallest number of fp16,
    until they are multiplied with the loss scale. Lost, they no longer cancel what all rows of the head have in common.
    """
    draw, scale, items, labels = torch.Generator().manual_seed(0), 1024.0, 4, torch.arange(ROWS)
    hidden = torch.randn(ROWS, WIDTH, generator=draw).half()
    head = 0.02 * torch.randn(20_000, WIDTH, generator=draw) + 0.2 * torch.randn(WIDTH, generator=draw)
    head[labels] += 0.16 * hidden.float()
    head = head.half()
    logits = (hidden @ head.t()).double().requires_grad_()  # what the forward rounds is another matter
    loss = functional.cross_entropy(logits, labels, reduction="sum") * scale / items
    wanted = torch.autograd.grad(loss, logits)[0] @ head.double()
    off = []
    for upstream in (scale / items, 1.0):
        ours = hidden.clone().requires_grad_()
        total = linear_cross_entropy(ours, head, labels, upstream=upstream, chunk_rows=ROWS, backend="portable")
        (found,) = torch.autograd.grad(total, ours, torch.tensor(scale / items))
        off.append(float((found.double() - wanted).norm() / wanted.norm()))
    assert off[0] < 2e-3 and off[1] > 0.05, off


# --- operands ----------------------------------------------------------------------------------------------


def test_under_autocast_products_run_in_its_dtype() -> None:
    """As a linear layer's would: of full fine-tuning both are float32, the norm's answer and the weights."""
    hidden, head, labels = inputs(torch.float32)
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    for function in (linear_cross_entropy, token_figures):
        with torch.autocast("cpu", torch.bfloat16), Products() as products:
            found = function(hidden, head, labels, chunk_rows=24)
            if isinstance(found, Tensor):
                found.backward()
        assert products.seen == {torch.bfloat16}, function
    with Products() as products:
        linear_cross_entropy(hidden, head, labels, chunk_rows=24)
    assert products.seen == {torch.float32}


def test_a_trained_heads_gradient_is_summed_in_float32() -> None:
    """Of 64 chunks of one row, of which many add up in the same rows of the head."""
    hidden, head, labels = inputs(torch.float32)
    labels = labels % 3
    head.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden, head, labels, chunk_rows=1).backward()
    assert head.grad is not None and head.grad.dtype == torch.float32
    assert not torch.equal(head.grad, head.grad.bfloat16().float()), "not rounded to 16 bits at the end"
    exact = head.detach().bfloat16().double().requires_grad_()
    rounded = hidden.bfloat16().double()
    (wanted,) = torch.autograd.grad(functional.cross_entropy(rounded @ exact.t(), labels, reduction="sum"), exact)
    assert slope(head.grad, wanted) == pytest.approx(1.0, abs=3e-3)
    assert (head.grad - wanted).norm() / wanted.norm() < 1e-2


# --- log-probabilities that are compared -------------------------------------------------------------------


@pytest.mark.parametrize("options", [HeadOptions(), HeadOptions(softcap=5.0, scale=2.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_probabilities_are_those_of_a_float32_head(dtype: torch.dtype, options: HeadOptions) -> None:
    """Stated tolerance: 1e-5 absolute. With logits in 16 bits they would be up to a thousand times as far off."""
    hidden, head, labels = inputs(dtype)
    wanted = -row_losses(hidden.double() @ head.double().t(), labels, None, options)
    found = token_logprobs(hidden, head, labels, options=options, chunk_rows=24)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
    stored = -row_losses((hidden @ head.t()).double(), labels, None, options)
    assert (stored - wanted).abs().max() > (5e-3 if dtype == torch.bfloat16 else 5e-4)


def test_a_sequences_ratio_is_one_where_the_weights_are() -> None:
    """A packed pass against one row at a time: products of other shapes, the same log-probabilities."""
    hidden, head, labels = inputs(torch.bfloat16)
    together = token_logprobs(hidden, head, labels)
    alone = torch.cat([token_logprobs(hidden[at : at + 1], head, labels[at : at + 1]) for at in range(ROWS)])
    assert float((together - alone).sum().abs()) < 1e-4


@pytest.mark.parametrize("at_once", [4096, 300, 1])
def test_a_product_in_parts_is_the_whole_product(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of hidden states with the head, and of the logits' gradients."""
    monkeypatch.setattr(chunk, "WIDE_AT_ONCE", at_once)
    hidden, head, _ = inputs(torch.bfloat16)
    for left, right in ((hidden, head.t()), ((hidden @ head.t()), head)):
        found = torch.full((ROWS, right.shape[1]), float("nan"))
        chunk.wide_product(left, right, out=found)
        torch.testing.assert_close(found.double(), left.double() @ right.double(), rtol=1e-5, atol=2e-4)


# --- figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "backend", "biased"),
    pairwise(OPTIONS[:3], [torch.float32, torch.bfloat16], BACKENDS, [False, True]),
)
def test_figures_are_those_of_whole_logits(
    options: HeadOptions, dtype: torch.dtype, backend: Backend, biased: bool
) -> None:
    """Counts are equal; losses within 1e-5. A third of the labels are right, one row in ten has none."""
    hidden, head, labels = inputs(dtype)
    bias = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)).to(dtype) if biased else None
    raw = torch.cat([hidden[at : at + 24] @ head.t() for at in range(0, ROWS, 24)])  # products of the chunks' shapes
    z = (raw.float() if bias is None else raw.float() + bias.float()) * options.scale
    z = z if options.softcap is None else options.softcap * torch.tanh(z / options.softcap)
    labels[::3] = z.argmax(dim=1)[::3]
    labels[::10] = -100
    found = token_figures(hidden, head, labels, bias=bias, options=options, chunk_rows=24, backend=backend)
    assert found.right.sum() > 15 and not found.right[::10].any()
    assert torch.equal(found.right, z.argmax(dim=1) == labels)
    wanted = functional.cross_entropy(z, labels, reduction="none")
    torch.testing.assert_close(found.losses, wanted, rtol=1e-5, atol=1e-5)
    total = linear_cross_entropy(hidden, head, labels, bias=bias, options=options, chunk_rows=24, backend=backend)
    torch.testing.assert_close(found.losses.sum(), total, rtol=1e-5, atol=0)
    assert not token_figures(hidden.requires_grad_(), head, labels, bias=bias).losses.requires_grad


def test_of_equal_logits_the_first_is_taken() -> None:
    """As greedy decoding does. In bfloat16 equal logits are common."""
    hidden, head = torch.ones(2, 8).bfloat16(), torch.zeros(5, 8).bfloat16()
    head[1] = head[3] = 1.0
    for backend in BACKENDS:
        found = token_figures(hidden, head, torch.tensor([1, 3]), backend=backend)
        assert found.right.tolist() == [True, False]
