"""Output head and cross-entropy in one: chunk by chunk, with the gradient made in the forward, never whole logits.

For the rows of a chunk logits, loss, d loss / d logits and from it the gradient of the hidden states (and of a trained
head) are made while the logits are at hand; the backward only scales what is kept. No recomputation, and the peak is
one chunk of logits in float32, whatever the number of tokens. (Idea: Liger Kernel, arXiv:2410.10989; Wijmans et al.
2024, arXiv:2411.09009.)

    z = soft-cap(scale · (h·Wᵀ + b)),   soft-cap(z) = cap · tanh(z / cap)
    loss of a row = (1 - s) · (lse(z) - z[y]) + s · (lse(z) - mean(z)) + z_loss · lse(z)²

with label smoothing s as torch has it. Rows whose label is IGNORE_INDEX count for nothing.

There is no choice to make by size: where whole logits are small they are one chunk, and nothing is computed twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.train.batch import IGNORE_INDEX
from core.train.kernels.interface import Backend
from core.train.loss.chunk import Chunks, HeadOptions, loss_backend

__all__ = ["IGNORE_INDEX", "PLAIN", "HeadOptions", "default_chunk_rows", "linear_cross_entropy", "token_logprobs"]

CHUNK_BYTES = {"cpu": 24 * 2**20, "cuda": 256 * 2**20}
"""Logits of one chunk in float32; with the Triton kernel, which makes no copy of them, in their own dtype. On a CPU
they stay in the last-level cache: for 1,024 rows of 576 and a vocabulary of 49,152 one Zen 4 core took 0.88 s in chunks
of 64 rows, 0.86 of 128, 1.00 of 256, and 1.14 for the full computation (128 rows in all: 0.10 and 0.10)."""
PLAIN = HeadOptions()


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: HeadOptions = PLAIN,
    count: Tensor | float | None = None,
    chunk_rows: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Sum of the rows' losses, float32 []; divided by `count` when it is given.

    hidden [n, H] and head [V, H] of one float dtype, labels int64 [n] (already shifted: labels[i] is what row i is to
    predict), bias [V] frozen. The head gets a gradient if it requires one, accumulated in float32. Gradients are
    exact to the rounding of the products' dtype; second derivatives are not defined. `backend`: not the device's own
    choice (`core.train.kernels.interface`) but this one, where it has the dtype and the options.
    """
    backend = loss_backend(hidden, bias, options, backend)
    rows = chunk_rows or _default_rows(hidden, head, backend)
    with torch.autocast(hidden.device.type, enabled=False):
        head = head.to(hidden.dtype)
        total = cast(Tensor, _LinearCrossEntropy.apply(hidden, head, bias, labels, options, rows, backend))  # type: ignore[no-untyped-call]
    return total if count is None else total / count


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: HeadOptions = PLAIN,
    chunk_rows: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """log p(labels[i] | row i), float32 [n], 0 where the label is IGNORE_INDEX: for DPO, GRPO, PPO. Arguments as above.
    Label smoothing and z-loss do not apply. A trained head costs a second pass over the chunks in the backward."""
    options = replace(options, label_smoothing=0.0, z_loss=0.0)
    backend = loss_backend(hidden, bias, options, backend)
    rows = chunk_rows or _default_rows(hidden, head, backend)
    with torch.autocast(hidden.device.type, enabled=False):
        head = head.to(hidden.dtype)
        return cast(Tensor, _TokenLogprobs.apply(hidden, head, bias, labels, options, rows, backend))  # type: ignore[no-untyped-call]


def default_chunk_rows(device: torch.device, vocabulary: int, itemsize: int = 4) -> int:
    """Rows whose logits of so many bytes fill the device type's CHUNK_BYTES; at least 32, so that products stay matrix
    products."""
    return max(32, CHUNK_BYTES.get(device.type, 64 * 2**20) // (itemsize * vocabulary) // 32 * 32)


def _default_rows(hidden: Tensor, head: Tensor, backend: Backend) -> int:
    itemsize = hidden.dtype.itemsize if backend == "triton" else 4
    return default_chunk_rows(hidden.device, head.shape[0], itemsize)


# --- the sum of losses -----------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int,
        backend: Backend,
    ) -> Tensor:  # fmt: skip
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        chunks = Chunks(hidden, head, bias, options, rows, backend)
        grad_hidden = torch.empty_like(hidden) if with_hidden else None
        grad_head = torch.zeros_like(head, dtype=chunks.dtype) if with_head else None
        total = torch.zeros((), dtype=chunks.dtype, device=hidden.device)
        losses = torch.empty(chunks.rows, dtype=chunks.dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            loss = losses[: h.shape[0]]
            grad = chunks.losses(h, y, loss, gradient=with_hidden or with_head)
            total += loss.sum()
            if grad_hidden is not None and grad is not None:
                torch.mm(grad, head, out=grad_hidden[start : start + chunks.rows])
            if grad_head is not None and grad is not None:
                grad_head += grad.t() @ h
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        by_hidden = None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype)
        by_head = None if grad_head is None else (grad_head * grad).to(ctx.head_dtype)
        return by_hidden, by_head, None, None, None, None, None


# --- one value a token -----------------------------------------------------------------------------


class _TokenLogprobs(torch.autograd.Function):
    """A log-probability is the plain loss with its sign turned. A row's gradient is its upstream gradient times a
    vector that the forward already knows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int,
        backend: Backend,
    ) -> Tensor:  # fmt: skip
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        chunks = Chunks(hidden, head, bias, options, rows, backend)
        out = torch.empty(hidden.shape[0], dtype=chunks.dtype, device=hidden.device)
        direction = torch.empty_like(hidden) if with_hidden else None
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            grad = chunks.losses(h, y, out[start : start + chunks.rows], gradient=with_hidden, factor=-1.0)
            if direction is not None and grad is not None:
                torch.mm(grad, head, out=direction[start : start + chunks.rows])
        saved = (direction, hidden, head, bias, labels) if with_head else (direction, None, None, None, None)
        ctx.save_for_backward(*saved)
        ctx.about = (options, rows, backend)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        direction, hidden, head, bias, labels = ctx.saved_tensors
        options, rows, backend = ctx.about
        by_hidden = None if direction is None else direction * upstream.unsqueeze(1).to(direction.dtype)
        if head is None:
            return by_hidden, None, None, None, None, None, None
        chunks = Chunks(hidden, head, bias, options, rows, backend)
        weight = upstream.to(chunks.dtype).contiguous()
        grad_head = torch.zeros_like(head, dtype=chunks.dtype)
        unused = torch.empty(chunks.rows, dtype=chunks.dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            at = slice(start, start + chunks.rows)
            grad = chunks.losses(h, y, unused[: h.shape[0]], gradient=True, factor=-1.0, weight=weight[at])
            assert grad is not None
            grad_head += grad.t() @ h
        return by_hidden, grad_head.to(head.dtype), None, None, None, None, None
