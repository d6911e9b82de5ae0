"""One chunk of logits: loss of each row and d loss / d logits, by torch, by the C kernels or by the Triton kernel.

`core.train.loss.linear_cross_entropy` has the formula. The logits and their gradient share one buffer, unless the
logits are wider than the head.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import assert_never

import torch
from torch import Tensor

from core.train.batch import IGNORE_INDEX
from core.train.kernels import native
from core.train.kernels.interface import Backend, backend_for

log = logging.getLogger("eft.train.loss")


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What a model does to its logits, and what is asked of the loss."""

    softcap: float | None = None
    """Gemma's final_logit_softcapping."""
    scale: float = 1.0
    """Factor on the logits: Cohere's logit_scale, Granite's 1 / logits_scaling."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def loss_backend(
    device: torch.device, dtype: torch.dtype, bias: Tensor | None, options: HeadOptions, asked: Backend | None = None
) -> Backend:
    """Which backend does the rows of logits in this dtype: `asked`, or the one of the device, where it has this dtype
    and these options; else torch."""
    backend = asked or backend_for(device, "loss")
    match backend:
        case "portable":
            return backend
        case "native":
            plain = bias is None and options.scale == 1.0 and options.softcap is None and not options.label_smoothing
            served = plain and dtype == torch.bfloat16 and native.serves(dtype)
        case "triton":
            served = dtype in (torch.bfloat16, torch.float16, torch.float32)
        case _:
            assert_never(backend)
    return backend if served else "portable"


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over logits of this dtype are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Chunks:
    """The buffers of one call, used for every chunk: fresh ones would cost page faults that outweigh the arithmetic."""

    def __init__(
        self,
        head: Tensor,
        bias: Tensor | None,
        options: HeadOptions,
        rows: int,
        backend: Backend,
        *,
        wide: bool = False,
    ) -> None:
        """head [V, H] in the dtype of the hidden states. `wide`: the logits are float32 (float64) as the product makes
        them, and never rounded to the head's dtype."""
        self.head, self.bias, self.options, self.backend, self.rows = head, bias, options, backend, rows
        self.dtype = wide_dtype(head.dtype)
        self.wide = wide and head.dtype != self.dtype
        width, device = head.shape[0], head.device
        if backend == "triton":
            from core.train.kernels.triton.loss import padded

            width = padded(width)
        self._product = torch.empty((rows, width), dtype=self.dtype if wide else head.dtype, device=device)
        self._wide = self._product
        if backend == "portable" and self._product.dtype != self.dtype:
            self._wide = torch.empty((rows, width), dtype=self.dtype, device=device)
        self._capped = torch.empty_like(self._wide) if options.softcap is not None and backend == "portable" else None
        self._slope: Tensor | None = None

    def product(self, h: Tensor) -> Tensor:
        """h·Wᵀ [c, V] of hidden states h [c, H] with c at most `rows`, valid until the next call."""
        raw = self._product[: h.shape[0], : self.head.shape[0]]
        if self.wide:
            wide_product(h, self.head.t(), out=raw)
        else:
            torch.mm(h, self.head.t(), out=raw)
        return raw

    def losses(
        self,
        raw: Tensor,
        labels: Tensor,
        out: Tensor,
        *,
        gradient: bool,
        factor: float = 1.0,
        weight: Tensor | None = None,
        right: Tensor | None = None,
    ) -> Tensor | None:
        """Fill out[i] with factor · loss of row i (0 where its label is IGNORE_INDEX) and `right`[i] with whether the
        label is the first of the largest logits. With `gradient`, return factor · weight[i] · d loss / d (h·Wᵀ),
        [c, V] in the head's dtype, valid until the next call.

        raw [c, V] as `product` answers it, labels int64 [c], out and weight [c] of `dtype`, right bool [c]."""
        if self.backend == "triton":
            if right is not None:  # scale and cap change no order
                torch.eq(_first_largest(raw if self.bias is None else raw + self.bias), labels, out=right)
            return self._in_triton(raw, labels, out, gradient, factor, weight)
        kept, at = (labels != IGNORE_INDEX).to(self.dtype), labels.clamp(min=0).unsqueeze(1)
        soft, smoothing = self._softmax(raw, at, labels, right), self.options.label_smoothing
        lse = soft.lse
        loss = lse - (1 - smoothing) * soft.picked - smoothing * soft.mean + self.options.z_loss * lse.square()
        torch.mul(loss * kept, factor, out=out)
        if not gradient:
            return None
        by = kept * factor if weight is None else kept * factor * weight
        return self._gradient(self._sloped(raw), soft, at, by, 1 + 2 * self.options.z_loss * lse)

    def _sloped(self, raw: Tensor) -> Tensor:
        """Where the gradient goes: over the logits, or beside them where they are wider than the head."""
        if not self.wide:
            return raw
        if self._slope is None:
            self._slope = torch.empty((self.rows, raw.shape[1]), dtype=self.head.dtype, device=raw.device)
        return self._slope[: raw.shape[0]]

    def _in_triton(
        self, raw: Tensor, labels: Tensor, out: Tensor, gradient: bool, factor: float, weight: Tensor | None
    ) -> Tensor | None:
        from core.train.kernels.triton.loss import loss_rows_

        options = self.options
        loss_rows_(
            self._product[: raw.shape[0]],
            raw.shape[1],
            labels,
            out,
            bias=self.bias,
            weight=weight,
            factor=factor,
            softcap=options.softcap,
            scale=options.scale,
            label_smoothing=options.label_smoothing,
            z_loss=options.z_loss,
            gradient=gradient,
        )
        if not gradient:
            return None
        return self._sloped(raw).copy_(raw) if self.wide else raw

    # --- by torch, and by the C kernels where they are -------------------------------------------

    def _softmax(self, raw: Tensor, at: Tensor, labels: Tensor, right: Tensor | None) -> _Softmax:
        """The logits as far as exp(z - max); the logits at the labels `at` [c, 1] and their mean. Fills `right`."""
        options, z = self.options, self._wide[: raw.shape[0]]
        if self.backend == "native":
            if right is not None:
                torch.eq(_first_largest(raw), labels, out=right)
            picked = raw.gather(1, at).squeeze(1).float()
            largest, total = native.softmax_stats(raw)
            return _Softmax(raw, largest, total, picked, picked)
        if self.bias is None and options.scale == 1.0 and options.softcap is None and not options.label_smoothing:
            if right is not None:
                torch.eq(_first_largest(raw), labels, out=right)
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
            self._capped[: z.shape[0]].copy_(z)
        if right is not None:
            torch.eq(_first_largest(z), labels, out=right)
        picked = z.gather(1, at).squeeze(1)
        mean = z.mean(dim=1)
        top = z.amax(dim=1, keepdim=True)
        z.sub_(top).exp_()
        return _Softmax(z, top.squeeze(1), z.sum(dim=1), picked, mean)

    def _gradient(self, out: Tensor, soft: _Softmax, at: Tensor, weight: Tensor, lse_weight: Tensor) -> Tensor:
        """weight · d (lse_weight · lse - (1 - s) z[y] - s mean(z)) / d (h·Wᵀ), into `out`. `weight` [c]."""
        z, options = soft.exp, self.options
        (c, vocabulary), smoothing = out.shape, options.label_smoothing
        factor = weight * lse_weight / soft.total
        if self.backend == "native":
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
    """exp(z - max) [c, V]; with the C kernels the logits themselves"""
    top: Tensor
    """max [c]"""
    total: Tensor
    """Sum of exp [c]"""
    picked: Tensor
    """z at the label [c]"""
    mean: Tensor
    """Mean of z [c]; without label smoothing any tensor [c]"""

    @property
    def lse(self) -> Tensor:
        return self.top + self.total.log()


def _first_largest(logits: Tensor) -> Tensor:
    """Index of each row's largest logit, the first of equals: what greedy decoding takes."""
    return logits.max(dim=1).indices  # three times as fast as argmax on a CPU


# --- a product in float32 of operands in 16 bits ---------------------------------------------------------

WIDE_AT_ONCE = 4096
"""Rows of the head that are float32 at once, where no operator does it by itself."""

READ_ONCE = 128
"""Rows up to which a product by the C kernel is quicker than widening a part of the head for each."""


def wide_product(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """out [c, n] = left [c, k] · right [k, n], summed and stored in the dtype of `out`: float32 for operands in 16
    bits. Where no operator does that, `right`, a head's weight or its transpose, is widened a part at a time."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
        return
    if _mm_widens(left.device, left.dtype):
        torch.mm(left, right, out_dtype=out.dtype, out=out)
        return
    bf16 = right.dtype is torch.bfloat16
    if bf16 and len(left) <= READ_ONCE and native.reads_once(right.t()) and out.is_contiguous():
        native.wide_product(left, right.t(), out)
        return
    inner, columns = right.shape
    if columns > inner:
        left = left.to(out.dtype)
        for start in range(0, columns, WIDE_AT_ONCE):
            at = slice(start, start + WIDE_AT_ONCE)
            torch.mm(left, right[:, at].to(out.dtype), out=out[:, at])
        return
    out.zero_()
    for start in range(0, inner, WIDE_AT_ONCE):
        at = slice(start, start + WIDE_AT_ONCE)
        out.addmm_(left[:, at].to(out.dtype), right[at].to(out.dtype))


@cache
def _mm_widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's own product of this dtype with a float32 result is there and right. It is CUDA's; builds for ROCm
    refused it for a while; CPUs have none (and multiply float32 no more slowly, where they have no instructions for
    bfloat16)."""
    if device.type == "cpu":
        return False
    sides = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    found = torch.zeros(64, 64, device=device)
    try:
        torch.mm(sides[0], sides[1].t(), out_dtype=torch.float32, out=found)
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        log.info("products in %s with a float32 result are made in parts: %s", dtype, str(error).splitlines()[0])
        return False
    return torch.allclose(found, sides[0].float() @ sides[1].float().t(), rtol=1e-4, atol=1e-4)
