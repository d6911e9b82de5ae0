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

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.train.kernels import native

IGNORE_INDEX = -100
CHUNK_BYTES = {"cpu": 24 * 2**20, "cuda": 256 * 2**20}
"""Float32 logits of one chunk. On a CPU they stay in the last-level cache: for 1,024 rows of 576 and a vocabulary of
49,152 one Zen 4 core took 0.88 s in chunks of 64 rows, 0.86 of 128, 1.00 of 256, and 1.14 for the full computation
(128 rows in all: 0.10 and 0.10)."""


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
    rows = chunk_rows or default_chunk_rows(hidden.device, head.shape[0])
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
    rows = chunk_rows or default_chunk_rows(hidden.device, head.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        head = head.to(hidden.dtype)
        return cast(Tensor, _TokenLogprobs.apply(hidden, head, bias, labels, options, rows))  # type: ignore[no-untyped-call]


def default_chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Rows whose float32 logits fill the device type's CHUNK_BYTES; at least 32, so that products stay matrix
    products."""
    return max(32, CHUNK_BYTES.get(device.type, 64 * 2**20) // (4 * vocabulary) // 32 * 32)


# --- one chunk -------------------------------------------------------------------------------------


class _Chunks:
    """The buffers of one call, used for every chunk: fresh ones would cost page faults that outweigh the arithmetic."""

    def __init__(self, hidden: Tensor, head: Tensor, bias: Tensor | None, options: HeadOptions, rows: int) -> None:
        self.head, self.bias, self.options = head, bias, options
        self.rows = max(1, min(rows, hidden.shape[0]))
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        shape, device = (self.rows, head.shape[0]), hidden.device
        plain = bias is None and options.scale == 1.0 and options.softcap is None and not options.label_smoothing
        self._native = plain and device.type == "cpu" and head.dtype == torch.bfloat16 and native.serves(head.dtype)
        """Two passes in C over the bfloat16 logits, with no float32 copy of them."""
        self._product = torch.empty(shape, dtype=head.dtype, device=device)
        self._wide = torch.empty(shape if not self._native else (0, 0), dtype=self.dtype, device=device)
        self._capped = torch.empty(shape, dtype=self.dtype, device=device) if options.softcap is not None else None

    def exponentials(self, h: Tensor, at: Tensor) -> _Softmax:
        """Logits of the rows h [c, H], as far as exp(z - max); the logits at the labels `at` [c, 1] and their mean."""
        c, options = h.shape[0], self.options
        raw, z = self._product[:c], self._wide[:c]
        torch.mm(h, self.head.t(), out=raw)
        if self._native:
            picked = raw.gather(1, at).squeeze(1).float()
            largest, total = native.softmax_stats(raw)
            return _Softmax(raw, largest, total, picked, picked)
        if self.bias is None and options.scale == 1.0 and options.softcap is None and not options.label_smoothing:
            picked = raw.gather(1, at).squeeze(1).to(self.dtype)
            top = raw.amax(dim=1, keepdim=True).to(self.dtype)
            torch.sub(raw, top, out=z).exp_()
            return _Softmax(z, top.squeeze(1), z.sum(dim=1), picked, picked)
        z.copy_(raw)
        if self.bias is not None:
            z.add_(self.bias)
        if options.scale != 1.0:
            z.mul_(options.scale)
        if options.softcap is not None and self._capped is not None:
            z.div_(options.softcap).tanh_().mul_(options.softcap)
            self._capped[:c].copy_(z)
        picked = z.gather(1, at).squeeze(1)
        mean = z.mean(dim=1)
        top = z.amax(dim=1, keepdim=True)
        z.sub_(top).exp_()
        return _Softmax(z, top.squeeze(1), z.sum(dim=1), picked, mean)

    def gradient(self, soft: _Softmax, at: Tensor, weight: Tensor, lse_weight: Tensor, smoothing: float) -> Tensor:
        """weight · d (lse_weight · lse - (1 - s) z[y] - s mean(z)) / d (h·Wᵀ), [c, V] in the head's dtype. `weight`
        [c]."""
        c, vocabulary = soft.exp.shape
        out, z, options = self._product[:c], soft.exp, self.options
        factor = weight * lse_weight / soft.total
        if self._native:
            at_label = (soft.picked - soft.top).exp() * factor - weight
            native.softmax_scale_(out, soft.top, factor)
            return out.scatter_(1, at, at_label.unsqueeze(1).to(out.dtype))
        at_label = z.gather(1, at) * factor.unsqueeze(1) - (
            weight * (1 - smoothing + smoothing / vocabulary)
        ).unsqueeze(1)
        if options.scale == 1.0 and options.softcap is None and not smoothing:
            torch.mul(z, factor.unsqueeze(1), out=out)
            return out.scatter_(1, at, at_label.to(out.dtype))
        z.mul_(factor.unsqueeze(1))
        if smoothing:
            z.sub_((weight * (smoothing / vocabulary)).unsqueeze(1))
        z.scatter_(1, at, at_label)
        if options.softcap is not None and self._capped is not None:
            slope = self._capped[:c].div_(options.softcap)
            z.mul_(slope.square_().neg_().add_(1.0))
        if options.scale != 1.0:
            z.mul_(options.scale)
        return out.copy_(z)


@dataclass(frozen=True, slots=True, eq=False)
class _Softmax:
    exp: Tensor
    """exp(z - max) [c, V]; with the native kernels the logits themselves"""
    top: Tensor
    """max [c]"""
    total: Tensor
    """Sum of exp [c]"""
    picked: Tensor
    """z at the label [c]"""
    mean: Tensor
    """Mean of z [c]; with no label smoothing whatever is at hand"""

    @property
    def lse(self) -> Tensor:
        return self.top + self.total.log()


# --- the sum of losses -----------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int
    ) -> Tensor:
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        chunks = _Chunks(hidden, head, bias, options, rows)
        grad_hidden = torch.empty_like(hidden) if with_hidden else None
        grad_head = torch.zeros_like(head, dtype=chunks.dtype) if with_head else None
        total = torch.zeros((), dtype=chunks.dtype, device=hidden.device)
        smoothing = options.label_smoothing
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            kept, at = (y != IGNORE_INDEX).to(chunks.dtype), y.clamp(min=0).unsqueeze(1)
            soft = chunks.exponentials(h, at)
            lse = soft.lse
            loss = lse - (1 - smoothing) * soft.picked - smoothing * soft.mean + options.z_loss * lse.square()
            total += (loss * kept).sum()
            if not (with_hidden or with_head):
                continue
            grad = chunks.gradient(soft, at, kept, 1 + 2 * options.z_loss * lse, smoothing)
            if grad_hidden is not None:
                torch.mm(grad, head, out=grad_hidden[start : start + chunks.rows])
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


# --- one value a token -----------------------------------------------------------------------------


class _TokenLogprobs(torch.autograd.Function):
    """A row's gradient is its upstream gradient times a vector that the forward already knows."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, bias: Tensor | None, labels: Tensor, options: HeadOptions, rows: int
    ) -> Tensor:
        with_hidden, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        chunks = _Chunks(hidden, head, bias, options, rows)
        out = torch.empty(hidden.shape[0], dtype=chunks.dtype, device=hidden.device)
        direction = torch.empty_like(hidden) if with_hidden else None
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            kept, at = (y != IGNORE_INDEX).to(chunks.dtype), y.clamp(min=0).unsqueeze(1)
            soft = chunks.exponentials(h, at)
            out[start : start + chunks.rows] = (soft.picked - soft.lse) * kept
            if direction is not None:
                grad = chunks.gradient(soft, at, -kept, torch.ones_like(kept), 0.0)
                torch.mm(grad, head, out=direction[start : start + chunks.rows])
        saved = (direction, hidden, head, bias, labels) if with_head else (direction, None, None, None, None)
        ctx.save_for_backward(*saved)
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
        chunks = _Chunks(hidden, head, bias, options, rows)
        grad_head = torch.zeros_like(head, dtype=chunks.dtype)
        for start in range(0, hidden.shape[0], chunks.rows):
            h, y = hidden[start : start + chunks.rows], labels[start : start + chunks.rows]
            weight = -((y != IGNORE_INDEX) * upstream[start : start + chunks.rows]).to(chunks.dtype)
            at = y.clamp(min=0).unsqueeze(1)
            soft = chunks.exponentials(h, at)
            grad_head += chunks.gradient(soft, at, weight, torch.ones_like(weight), 0.0).t() @ h
        return by_hidden, grad_head.to(head.dtype), None, None, None, None
