"""Output head and cross-entropy in one: chunk by chunk, with the gradient made in the forward, never whole logits.

For the rows of a chunk logits, loss, d loss / d logits and from it the gradient of the hidden states (and of a trained
head) are made while the logits are at hand; the backward only scales what is kept. No recomputation, and the peak is
one chunk of logits in float32, whatever the number of tokens. (Idea: Liger Kernel, arXiv:2410.10989; Wijmans et al.
2024, arXiv:2411.09009.)

    z = soft-cap(scale · (h·Wᵀ + b)),   soft-cap(z) = cap · tanh(z / cap)
    loss of a row = (1 - s) · (lse(z) - z[y]) + s · (lse(z) - mean(z)) + z_loss · lse(z)²

with label smoothing s as torch has it. Rows whose label is IGNORE_INDEX count for nothing.

Choose by size: where whole logits are small, `cross_entropy_of_logits` over the model's own head is as fast, and leaves
the model's forward as it is; `chunking_pays` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
CHUNK_BYTES = 64 * 2**20
"""Float32 logits of one chunk, by default."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What a model does to its logits, and what is asked of the loss."""

    softcap: float | None = None
    """Gemma's final_logit_softcapping."""
    scale: float = 1.0
    """Factor on the logits: Cohere's logit_scale, Granite's 1 / logits_scaling."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0


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
) -> Tensor:
    """Sum of the rows' losses, float32 []; divided by `count` when it is given.

    hidden [n, H] and head [V, H] of one float dtype, labels int64 [n] (already shifted: labels[i] is what row i is to
    predict), bias [V] frozen. The head gets a gradient if it requires one, accumulated in float32. Gradients are
    exact to the rounding of the products' dtype; second derivatives are not defined.
    """
    rows = chunk_rows or default_chunk_rows(head.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        head = head.to(hidden.dtype)
        total = cast(Tensor, _LinearCrossEntropy.apply(hidden, head, bias, labels, options, rows))  # type: ignore[no-untyped-call]
    return total if count is None else total / count


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    options: HeadOptions = PLAIN,
    chunk_rows: int | None = None,
) -> Tensor:
    """log p(labels[i] | row i), float32 [n], 0 where the label is IGNORE_INDEX: for DPO, GRPO, PPO. Arguments as above.
    Label smoothing and z-loss do not apply. A trained head costs a second pass over the chunks in the backward."""
    rows = chunk_rows or default_chunk_rows(head.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        head = head.to(hidden.dtype)
        return cast(Tensor, _TokenLogprobs.apply(hidden, head, bias, labels, options, rows))  # type: ignore[no-untyped-call]


def default_chunk_rows(vocabulary: int) -> int:
    """Rows whose float32 logits fill CHUNK_BYTES; at least 32, so that the products stay matrix products."""
    return max(32, CHUNK_BYTES // (4 * vocabulary) // 32 * 32)


# --- one chunk -------------------------------------------------------------------------------------


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, options: HeadOptions, out: Tensor) -> Tensor:
    """Float32 logits [c, V] in `out`; the product itself is in the inputs' dtype, as the model's own head has it."""
    if hidden.dtype == torch.float32:
        torch.mm(hidden, head.t(), out=out)
    else:
        out.copy_(torch.mm(hidden, head.t()))
    if bias is not None:
        out.add_(bias)
    if options.scale != 1.0:
        out.mul_(options.scale)
    if options.softcap is not None:
        out.div_(options.softcap).tanh_().mul_(options.softcap)
    return out


def _through_cap(grad: Tensor, capped: Tensor | None, options: HeadOptions) -> Tensor:
    """d / d (h·Wᵀ) from d / d logits, in place. `capped`: the logits after the cap."""
    if options.softcap is not None and capped is not None:
        grad.mul_(1 - (capped / options.softcap).square_())
    if options.scale != 1.0:
        grad.mul_(options.scale)
    return grad


def _buffer(rows: int, hidden: Tensor, head: Tensor) -> Tensor:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return torch.empty(min(rows, hidden.shape[0]), head.shape[0], dtype=dtype, device=hidden.device)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int
    ) -> Tensor:
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        buffer = _buffer(rows, hidden, head)
        grad_hidden = torch.empty_like(hidden) if with_hidden else None
        grad_head = torch.zeros_like(head, dtype=buffer.dtype) if with_head else None
        total = torch.zeros((), dtype=buffer.dtype, device=hidden.device)
        smoothing, vocabulary = options.label_smoothing, head.shape[0]
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start : start + rows], labels[start : start + rows]
            z = _logits(h, head, bias, options, buffer[: h.shape[0]])
            kept = (y != IGNORE_INDEX).to(z.dtype)
            at = y.clamp(min=0).unsqueeze(1)
            picked = z.gather(1, at).squeeze(1)
            mean = z.mean(dim=1) if smoothing else picked
            capped = z.clone() if options.softcap is not None and (with_hidden or with_head) else None
            lse, z = _softmax_(z)
            loss = lse - (1 - smoothing) * picked - smoothing * mean
            if options.z_loss:
                loss = loss + options.z_loss * lse.square()
            total += (loss * kept).sum()
            if not (with_hidden or with_head):
                continue
            if options.z_loss:
                z.mul_((1 + 2 * options.z_loss * lse).unsqueeze(1))
            if smoothing:
                z.sub_(smoothing / vocabulary)
            z.scatter_add_(1, at, torch.full_like(at, smoothing - 1, dtype=z.dtype))
            _through_cap(z, capped, options)
            grad = z.mul_(kept.unsqueeze(1)).to(head.dtype)
            if grad_hidden is not None:
                torch.mm(grad, head, out=grad_hidden[start : start + rows])
            if grad_head is not None:
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
        return by_hidden, by_head, None, None, None, None


def _softmax_(z: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp [c] and, in z's memory, the softmax."""
    top = z.amax(dim=1, keepdim=True)
    z.sub_(top).exp_()
    total = z.sum(dim=1, keepdim=True)
    z.div_(total)
    return (top + total.log()).squeeze(1), z


class _TokenLogprobs(torch.autograd.Function):
    """A row's gradient is its upstream gradient times a vector that the forward already knows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int
    ) -> Tensor:
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        buffer = _buffer(rows, hidden, head)
        out = torch.empty(hidden.shape[0], dtype=buffer.dtype, device=hidden.device)
        direction = torch.empty_like(hidden) if with_hidden else None
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start : start + rows], labels[start : start + rows]
            values, grad = _logprobs_chunk(h, head, bias, y, options, buffer, gradient=with_hidden)
            out[start : start + rows] = values
            if direction is not None and grad is not None:
                torch.mm(grad.to(head.dtype), head, out=direction[start : start + rows])
        if with_head:
            ctx.save_for_backward(direction, hidden, head, bias, labels)
        else:
            ctx.save_for_backward(direction, None, None, None, None)
        ctx.about = (options, rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        direction, hidden, head, bias, labels = ctx.saved_tensors
        options, rows = ctx.about
        by_hidden = None if direction is None else direction * upstream.unsqueeze(1).to(direction.dtype)
        if head is None:
            return by_hidden, None, None, None, None, None
        buffer = _buffer(rows, hidden, head)
        grad_head = torch.zeros_like(head, dtype=buffer.dtype)
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start : start + rows], labels[start : start + rows]
            _, grad = _logprobs_chunk(h, head, bias, y, options, buffer, gradient=True)
            assert grad is not None
            grad_head += grad.mul_(upstream[start : start + rows].unsqueeze(1)).to(head.dtype).t() @ h
        return by_hidden, grad_head.to(head.dtype), None, None, None, None


def _logprobs_chunk(
    h: Tensor, head: Tensor, bias: Tensor | None, y: Tensor, options: HeadOptions, buffer: Tensor, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """log p of the labels, and its derivative by h·Wᵀ: onehot - softmax."""
    z = _logits(h, head, bias, options, buffer[: h.shape[0]])
    kept = (y != IGNORE_INDEX).to(z.dtype)
    at = y.clamp(min=0).unsqueeze(1)
    picked = z.gather(1, at).squeeze(1)
    if not gradient:
        return (picked - z.logsumexp(dim=1)) * kept, None
    capped = z.clone() if options.softcap is not None else None
    lse, z = _softmax_(z)
    z.neg_().scatter_add_(1, at, torch.ones_like(at, dtype=z.dtype))
    _through_cap(z, capped, options)
    return (picked - lse) * kept, z.mul_(kept.unsqueeze(1))
