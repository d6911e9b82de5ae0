"""Output head and cross-entropy in one: chunk by chunk, with the gradient made in the forward, never whole logits.

For the rows of a chunk logits, loss, d loss / d logits and from it the gradient of the hidden states (and of a trained
head) are made while the logits are there; the backward only scales what is kept. No recomputation, and the peak is
one chunk of logits in float32, whatever the number of tokens. (Idea: Liger Kernel, arXiv:2410.10989; Wijmans et al.
2024, arXiv:2411.09009.)

    z = soft-cap(scale · (h·Wᵀ + b)),   soft-cap(z) = cap · tanh(z / cap)
    loss of a row = (1 - s) · (lse(z) - z[y]) + s · (lse(z) - mean(z)) + z_loss · lse(z)²

with label smoothing s as torch has it. Rows whose label is IGNORE_INDEX count for nothing.

No choice by size is needed: where whole logits are small they are one chunk, and nothing is computed twice.

Under autocast the products run in its dtype, whatever the hidden states and the head are (the weights of full
fine-tuning and what their final norm returns are float32). The gradient of a trained head is summed in float32 and
handed back as that.

The gradient that arrives in the backward, 1 / label tokens say, is a number that no 16-bit float has. Rounded to one it
would scale all gradients of a step alike, by up to 0.4 % in bfloat16; so would it in the gradients of logits, which are
-1 at most labels, or multiplied onto what has been rounded before. So `upstream` says it beforehand, and it goes into
the product that makes the gradients of the hidden states, before their only rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.plan import constants
from core.train.batch import IGNORE_INDEX
from core.train.kernels.interface import Backend
from core.train.loss.chunk import Chunks, HeadOptions, loss_backend, wide_dtype, wide_product

__all__ = [
    "IGNORE_INDEX",
    "PLAIN",
    "HeadOptions",
    "TokenFigures",
    "linear_cross_entropy",
    "token_figures",
    "token_logprobs",
]

PLAIN = HeadOptions()


def linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: HeadOptions = PLAIN,
    count: float | None = None,
    upstream: float | None = None,
    chunk_rows: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Sum of the rows' losses, float32 []; divided by `count` when it is given.

    hidden [n, H] and head [V, H] of one float dtype (any two under autocast), labels int64 [n] (already shifted:
    labels[i] is what row i is to predict), bias [V] frozen. The head gets a gradient if it requires one, accumulated in
    float32. Gradients are exact to the rounding of the products' dtype; second derivatives are not defined. `upstream`:
    the gradient of the sum that the backward is going to bring (1 / count by default); another one is right, too, and
    rounds once more. `backend`: not the device's own choice (`core.train.kernels.interface`) but this one, where it has
    the dtype and the options.
    """
    hidden, rows, backend = _prepare(hidden, head, bias, options, chunk_rows, backend)
    expected = upstream if upstream is not None else 1.0 if count is None else 1.0 / count
    with torch.autocast(hidden.device.type, enabled=False):
        total = cast(
            Tensor,
            _LinearCrossEntropy.apply(hidden, head, bias, labels, options, rows, backend, expected),  # type: ignore[no-untyped-call]
        )
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
    Label smoothing and z-loss do not apply. A trained head costs a second pass over the chunks in the backward.

    The logits are float32 as the product makes them, also of operands in 16 bits: rounded to bfloat16 they would shift
    a token's log-probability by up to a tenth, and the ratio of two of a sequence by a quarter."""
    options = replace(options, label_smoothing=0.0, z_loss=0.0)
    hidden, rows, backend = _prepare(hidden, head, bias, options, chunk_rows, backend, wide=True)
    with torch.autocast(hidden.device.type, enabled=False):
        return cast(Tensor, _TokenLogprobs.apply(hidden, head, bias, labels, options, rows, backend))  # type: ignore[no-untyped-call]


def logprob_chunks(hidden: Tensor, head: Tensor, bias: Tensor | None, options: HeadOptions, rows: int) -> Chunks:
    """What `token_logprobs` computes such hidden states with, so many rows at a time."""
    hidden, rows, backend = _prepare(hidden, head, bias, options, rows, None, wide=True)
    return Chunks(head.to(hidden.dtype), bias, options, rows, backend, wide=True)


@dataclass(frozen=True, slots=True, eq=False)
class TokenFigures:
    """The loss of each label, and whether it is predicted."""

    losses: Tensor
    """-log p of each label, float32 [n]."""
    right: Tensor
    """Whether greedy decoding would take the label: it is the first of the largest logits. bool [n]."""


@torch.no_grad()
def token_figures(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: HeadOptions = PLAIN,
    chunk_rows: int | None = None,
    backend: Backend | None = None,
) -> TokenFigures:
    """The losses that `linear_cross_entropy` adds up, of the same chunks, and which labels are right. No gradients.
    Label smoothing and z-loss do not apply."""
    options = replace(options, label_smoothing=0.0, z_loss=0.0)
    hidden, rows, backend = _prepare(hidden, head, bias, options, chunk_rows, backend)
    with torch.autocast(hidden.device.type, enabled=False):
        chunks = _chunks(hidden, head, bias, options, rows, backend)
        losses = torch.empty(hidden.shape[0], dtype=chunks.dtype, device=hidden.device)
        right = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        for start in range(0, hidden.shape[0], chunks.rows):
            at = slice(start, start + chunks.rows)
            chunks.losses(chunks.product(hidden[at]), labels[at], losses[at], gradient=False, right=right[at])
    return TokenFigures(losses, right)


def _prepare(
    hidden: Tensor, head: Tensor, bias: Tensor | None, options: HeadOptions, rows: int | None, backend: Backend | None,
    *, wide: bool = False,
) -> tuple[Tensor, int, Backend]:  # fmt: skip
    """The hidden states in the dtype of the products (autocast's, where it is on; it leaves float64 alone), the rows of
    a chunk, and the backend. `wide`: the logits are float32 as the product makes them."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    dtype = wide_dtype(hidden.dtype) if wide else hidden.dtype
    backend = loss_backend(hidden.device, dtype, bias, options, backend)
    itemsize = dtype.itemsize if backend == "triton" else 4
    return hidden, rows or constants.chunk_rows("cpu" if kind == "cpu" else "gpu", head.shape[0], itemsize), backend


def _chunks(
    hidden: Tensor, head: Tensor, bias: Tensor | None, options: HeadOptions, rows: int, backend: Backend,
    wide: bool = False,
) -> Chunks:  # fmt: skip
    rows = max(1, min(rows, hidden.shape[0]))
    return Chunks(head.to(hidden.dtype), bias, options, rows, backend, wide=wide)


def _times(values: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """values [n, H] · by [n, 1] or [1, 1], multiplied in the wider of their dtypes and rounded once."""
    return torch.mul(values, by, out=torch.empty_like(values, dtype=dtype))


# --- the sum of losses -----------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int,
        backend: Backend, upstream: float,
    ) -> Tensor:  # fmt: skip
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        chunks = _chunks(hidden, head, bias, options, rows, backend)
        grad_hidden = torch.empty_like(hidden) if with_hidden else None
        grad_head = torch.zeros_like(head, dtype=chunks.dtype) if with_head else None
        total = torch.zeros((), dtype=chunks.dtype, device=hidden.device)
        losses = torch.empty(chunks.rows, dtype=chunks.dtype, device=hidden.device)
        size = 2.0 ** round(math.log2(upstream)) if hidden.dtype == torch.float16 else 1.0  # fp16 ends at 6e-8
        weight = None if size == 1.0 else torch.full_like(losses, size)
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            loss, by = losses[: h.shape[0]], None if weight is None else weight[: h.shape[0]]
            grad = chunks.losses(chunks.product(h), y, loss, gradient=with_hidden or with_head, weight=by)
            total += loss.sum()
            if grad_hidden is not None and grad is not None:
                at = grad_hidden[start : start + chunks.rows]
                at.addmm_(grad, chunks.head, beta=0, alpha=upstream / size)
            if grad_head is not None and grad is not None:
                grad_head += grad.t() @ h
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.about = (head.dtype, upstream, size)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head = ctx.saved_tensors
        dtype, upstream, size = ctx.about
        by_hidden = None
        if grad_hidden is not None:
            by_hidden = _times(grad_hidden, (grad / upstream).view(1, 1), grad_hidden.dtype)
        by_head = None if grad_head is None else (grad_head * (grad / size)).to(dtype)
        return by_hidden, by_head, None, None, None, None, None, None


# --- one value a token -----------------------------------------------------------------------------


class _TokenLogprobs(torch.autograd.Function):
    """A log-probability is the plain loss with its sign turned. A row's gradient is its upstream gradient times a
    vector that the forward already knows, in float32, and is rounded when both are there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int,
        backend: Backend,
    ) -> Tensor:  # fmt: skip
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        chunks = _chunks(hidden, head, bias, options, rows, backend, wide=True)
        out = torch.empty(hidden.shape[0], dtype=chunks.dtype, device=hidden.device)
        direction = torch.empty_like(hidden, dtype=chunks.dtype) if with_hidden else None
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            grad = chunks.losses(
                chunks.product(h), y, out[start : start + chunks.rows], gradient=with_hidden, factor=-1.0
            )
            if direction is not None and grad is not None:
                wide_product(grad, chunks.head, out=direction[start : start + chunks.rows])
        saved = (direction, hidden, head, bias, labels) if with_head else (direction, None, None, None, None)
        ctx.save_for_backward(*saved)
        ctx.about = (options, rows, backend, hidden.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        direction, hidden, head, bias, labels = ctx.saved_tensors
        options, rows, backend, dtype = ctx.about
        by_hidden = None if direction is None else _times(direction, upstream.unsqueeze(1), dtype)
        if head is None:
            return by_hidden, None, None, None, None, None, None
        chunks = _chunks(hidden, head, bias, options, rows, backend, wide=True)
        weight = upstream.to(chunks.dtype).contiguous()
        grad_head = torch.zeros_like(head, dtype=chunks.dtype)
        unused = torch.empty(chunks.rows, dtype=chunks.dtype, device=hidden.device)
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            at = slice(start, start + chunks.rows)
            grad = chunks.losses(
                chunks.product(h), y, unused[: h.shape[0]], gradient=True, factor=-1.0, weight=weight[at]
            )
            assert grad is not None
            grad_head += grad.t() @ h
        return by_hidden, grad_head.to(head.dtype), None, None, None, None, None
