"""The Triton kernel of the loss, interpreted on the CPU, against float64: every option, edge shapes, numbers that are
none, and rows past element 2^31."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.train.loss.linear_cross_entropy import HeadOptions
from tests.support.interpreter import Run
from tests.support.whole_logits import OPTIONS, row_losses

KERNEL = "core.train.kernels.triton.loss:loss_rows_"
EPS = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""One rounding to the dtype, relative; float32: what some thousand float32 operations lose."""


def _kernel(interpreted: Run, logits: Tensor, vocabulary: int, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Losses, and the buffer as the kernel left it."""
    out = torch.full((logits.shape[0],), float("nan"))
    _, (buffer, _, _, losses) = interpreted(
        KERNEL, logits.clone(), vocabulary, labels, out, **options
    )  # shared with the child
    return losses, buffer


def _known(options: HeadOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("softcap", "scale", "label_smoothing", "z_loss")}


def _close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=EPS[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_are_those_of_float64(interpreted: Run, options: HeadOptions, dtype: torch.dtype) -> None:
    """Stated tolerance: 1e-5 of a loss, one rounding of its dtype for a gradient."""
    torch.manual_seed(0)
    rows, vocabulary, width = 6, 4161, 4224  # two loads of 4,096, the second ragged
    logits = torch.full((rows, width), float("nan"), dtype=dtype)
    logits[:, :vocabulary] = 3 * torch.randn(rows, vocabulary)
    labels = torch.tensor([0, 4160, 4095, -100, 4096, 17])
    bias, weight = torch.randn(vocabulary).to(dtype), torch.rand(rows) - 0.5
    exact = logits[:, :vocabulary].double().requires_grad_()
    wanted = row_losses(exact, labels, bias.double(), options)
    (slope,) = torch.autograd.grad(wanted, exact, -2.0 * weight.double())
    losses, buffer = _kernel(
        interpreted, logits, vocabulary, labels, bias=bias, weight=weight, factor=-2.0, gradient=True, **_known(options)
    )
    torch.testing.assert_close(losses.double(), -2.0 * wanted.detach(), rtol=1e-5, atol=1e-6)
    _close(buffer[:, :vocabulary], slope, dtype)
    assert losses[3] == 0 and (buffer[3, :vocabulary] == 0).all()


@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 4095, 4096, 4097, 12_345])
@pytest.mark.parametrize("rows", [1, 3])
def test_edge_shapes(interpreted: Run, vocabulary: int, rows: int) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(rows, vocabulary).bfloat16()  # rows as they come, not padded
    labels = torch.randint(0, vocabulary, (rows,))
    exact = logits.double().requires_grad_()
    wanted = row_losses(exact, labels, None, HeadOptions())
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    losses, buffer = _kernel(interpreted, logits, vocabulary, labels, gradient=True)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    _close(buffer, slope, torch.bfloat16)
    again, untouched = _kernel(interpreted, logits, vocabulary, labels, gradient=False)
    assert torch.equal(again, losses) and torch.equal(untouched, logits)


def test_what_is_no_number_stays_so(interpreted: Run) -> None:
    logits = torch.zeros(5, 70)
    logits[0, 3], logits[1, 69], logits[2, 5] = float("nan"), float("inf"), float("nan")
    labels = torch.tensor([0, 1, -100, 70, -7])  # the last two name no token
    losses, buffer = _kernel(interpreted, logits, 70, labels, gradient=True)
    assert not losses[[0, 1, 3, 4]].isfinite().any() and losses[2] == 0
    assert not buffer[[0, 1, 3, 4]].isfinite().all(dim=1).any() and (buffer[2] == 0).all()


def test_logits_far_from_zero_neither_overflow_nor_vanish(interpreted: Run) -> None:
    logits = torch.tensor([[3e4, 3e4 - 1, -3e4], [-3e4, -3e4, -3e4]])
    losses, _ = _kernel(interpreted, logits, 3, torch.tensor([1, 0]), gradient=False)
    wanted = row_losses(logits.double(), torch.tensor([1, 0]), None, HeadOptions())
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=2e-3)  # float32 at 3e4: steps of 0.002


def test_rows_past_two_to_the_31_elements(interpreted: Run, tmp_path: Path) -> None:
    (losses, slope), _ = interpreted("tests.support.whole_logits:far_away", str(tmp_path))
    values = torch.randn(3, 4100, generator=torch.Generator().manual_seed(0)).half().double().requires_grad_()
    wanted = row_losses(values, torch.tensor([7, -100, 4099]), None, HeadOptions())
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    _close(slope, torch.autograd.grad(wanted.sum(), values)[0][2], torch.float16)


# --- the whole loss, with this kernel in it --------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_chunked_loss_over_it(interpreted: Run, options: HeadOptions) -> None:
    """Stated tolerance: 2e-6 of the norm in float32."""
    torch.manual_seed(0)
    hidden, head, bias = torch.randn(50, 24), torch.randn(101, 24) * 0.3, torch.randn(101)
    labels = torch.randint(0, 101, (50,))
    labels[::5] = -100
    found, _ = interpreted(
        "tests.support.whole_logits:loss_and_gradients", hidden, head, labels, bias, options, 16  # the last chunk: 2
    )  # fmt: skip
    exact = [hidden.double().requires_grad_(), head.double().requires_grad_()]
    wanted = row_losses(exact[0] @ exact[1].t(), labels, bias.double(), options).sum()
    torch.testing.assert_close(found[0].double(), wanted.detach(), rtol=1e-6, atol=0)
    for ours, theirs in zip(found[1:], torch.autograd.grad(wanted, exact), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-6


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_log_probabilities_of_tokens_over_it(interpreted: Run, options: HeadOptions) -> None:
    torch.manual_seed(0)
    hidden, head, upstream = torch.randn(37, 24), torch.randn(101, 24) * 0.3, torch.randn(37)
    labels = torch.randint(0, 101, (37,))
    labels[::5] = -100
    found, _ = interpreted(
        "tests.support.whole_logits:logprobs_and_gradients", hidden, head, labels, options, upstream, 16
    )
    exact = [hidden.double().requires_grad_(), head.double().requires_grad_()]
    wanted = -row_losses(exact[0] @ exact[1].t(), labels, None, options)
    torch.testing.assert_close(found[0].double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found[1:], torch.autograd.grad(wanted, exact, upstream.double()), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 2e-6
