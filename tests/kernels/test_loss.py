"""Chunked linear cross-entropy against the full computation: loss and gradients, every option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.train.loss.linear_cross_entropy import HeadOptions, linear_cross_entropy, token_logprobs
from tests.support.whole_logits import OPTIONS, row_losses


def _full(hidden: Tensor, head: Tensor, labels: Tensor, bias: Tensor | None, options: HeadOptions) -> Tensor:
    return row_losses(hidden @ head.t(), labels, bias, options)


def _inputs(dtype: torch.dtype, n: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, head = torch.randn(n, 24, dtype=dtype), torch.randn(101, 24, dtype=dtype) * 0.3
    labels = torch.randint(0, 101, (n,))
    labels[::5] = -100
    return hidden.requires_grad_(), head.requires_grad_(), labels, torch.randn(101, dtype=dtype)


@pytest.mark.parametrize("chunk", [1, 16, 64])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_the_full_computation_in_float64(options: HeadOptions, chunk: int) -> None:
    hidden, head, labels, bias = _inputs(torch.float64)
    ours = linear_cross_entropy(hidden, head, labels, bias=bias, options=options, count=7.0, chunk_rows=chunk)
    wanted = _full(hidden, head, labels, bias, options).sum() / 7.0
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, [hidden, head]), torch.autograd.grad(wanted, [hidden, head]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_token_logprobs_equal_log_softmax_in_float64(options: HeadOptions) -> None:
    hidden, head, labels, bias = _inputs(torch.float64)
    ours = token_logprobs(hidden, head, labels, bias=bias, options=options, chunk_rows=16)
    plain = replace(options, label_smoothing=0.0, z_loss=0.0)  # neither is part of a probability
    wanted = -_full(hidden, head, labels, bias, plain)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(50, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(ours, [hidden, head], upstream),
        torch.autograd.grad(wanted, [hidden, head], upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_frozen_head_in_the_run_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    """Stated tolerance: 2e-6 of the norm in float32, 1 % in bfloat16 (one rounding of d logits)."""
    hidden, head, labels, _ = _inputs(dtype)
    head = head.detach()
    ours = linear_cross_entropy(hidden, head, labels, chunk_rows=16)
    wanted = functional.cross_entropy((hidden @ head.t()).float(), labels, reduction="sum")
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    a, b = torch.autograd.grad(ours, hidden)[0], torch.autograd.grad(wanted, hidden)[0]
    assert a.dtype == dtype and (a - b).float().norm() / b.float().norm() < tolerance


def test_no_labels_no_loss_and_no_gradient_under_no_grad() -> None:
    hidden, head, labels, _ = _inputs(torch.float32)
    loss = linear_cross_entropy(hidden, head, torch.full_like(labels, -100))
    assert loss.item() == 0.0 and torch.autograd.grad(loss, hidden)[0].abs().sum() == 0
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, head, labels).requires_grad
    assert linear_cross_entropy(hidden[:0], head, labels[:0]).item() == 0.0


def test_whole_logits_are_never_made() -> None:
    hidden, head = torch.randn(512, 16).requires_grad_(), torch.randn(4096, 16)
    labels = torch.randint(0, 4096, (512,))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        linear_cross_entropy(hidden, head, labels, chunk_rows=32).backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest <= 2 * 32 * 4096 * 4  # a chunk, not 512 × 4096


def test_dpo_and_grpo_on_token_logprobs_are_those_on_whole_logits() -> None:
    """Stated tolerance: 1e-5 in float32."""
    hidden, head, labels, _ = _inputs(torch.float32)
    head = head.detach()
    reference, advantages = torch.randn(50) * 0.1 - 4, torch.randn(50)

    def dpo(logprobs: Tensor) -> Tensor:
        chosen, rejected = (logprobs - torch.where(labels != -100, reference, 0.0)).view(2, 25).sum(1)
        return -functional.logsigmoid(0.1 * (chosen - rejected))

    def grpo(logprobs: Tensor) -> Tensor:
        ratio = (logprobs - reference).exp()
        clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -(clipped * (labels != -100)).sum() / (labels != -100).sum()

    for objective in (dpo, grpo):
        whole = (hidden @ head.t()).log_softmax(1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        wanted = objective(torch.where(labels != -100, whole, 0.0))
        ours = objective(token_logprobs(hidden, head, labels, chunk_rows=16))
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
        a, b = torch.autograd.grad(ours, hidden)[0], torch.autograd.grad(wanted, hidden)[0]
        assert (a - b).norm() / b.norm() < 1e-5
