"""One chunk of logits: loss of each row and d loss / d logits, by torch, by the C kernels or by the Triton kernel.

`core.train.loss.linear_cross_entropy` has the formula. The logits and their gradient share one buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from core.train.batch import IGNORE_INDEX
from core.train.kernels import native
from core.train.kernels.interface import Backend, backend_for


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What a model does to its logits, and what is asked of the loss."""

    softcap: float | None = None
    """Gemma's final_logit_softcapping."""
    scale: float = 1.0
    """Factor on the logits: Cohere's logit_scale, Granite's 1 / logits_scaling."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def loss_backend(hidden: Tensor, bias: Tensor | None, options: HeadOptions, asked: Backend | None = None) -> Backend:
    """Which backend does the rows of such hidden states: `asked`, or the one of the device, where it has this dtype and
    these options; else torch."""
    backend = asked or backend_for(hidden.device, "loss")
    match backend:
        case "portable":
            return backend
        case "native":
            plain = bias is None and options.scale == 1.0 and options.softcap is None and not options.label_smoothing
            served = plain and hidden.dtype == torch.bfloat16 and native.serves(hidden.dtype)
        case "triton":
            served = hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)
        case _:
            assert_never(backend)
    return backend if served else "portable"


class Chunks:
    """The buffers of one call, used for every chunk: fresh ones would cost page faults that outweigh the arithmetic."""

    def __init__(
        self, hidden: Tensor, head: Tensor, bias: Tensor | None, options: HeadOptions, rows: int, backend: Backend
    ) -> None:
        self.head, self.bias, self.options, self.backend = head, bias, options, backend
        self.rows = max(1, min(rows, hidden.shape[0]))
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        width, device = head.shape[0], hidden.device
        if backend == "triton":
            from core.train.kernels.triton.loss import padded

            width = padded(width)
        self._product = torch.empty((self.rows, width), dtype=head.dtype, device=device)
        wide = (self.rows, width) if backend == "portable" else (0, 0)
        self._wide = torch.empty(wide, dtype=self.dtype, device=device)
        self._capped = torch.empty_like(self._wide) if options.softcap is not None else None

    def losses(
        self,
        h: Tensor,
        labels: Tensor,
        out: Tensor,
        *,
        gradient: bool,
        factor: float = 1.0,
        weight: Tensor | None = None,
    ) -> Tensor | None:
        """Fill out[i] with factor · loss of row i (0 where its label is IGNORE_INDEX) and, with `gradient`, return
        factor · weight[i] · d loss / d (h·Wᵀ), [c, V] in the head's dtype, valid until the next call.

        h [c, H] with c at most `rows`, labels int64 [c], out and weight [c] of `dtype`."""
        raw = self._product[: h.shape[0], : self.head.shape[0]]
        torch.mm(h, self.head.t(), out=raw)
        if self.backend == "triton":
            return self._in_triton(raw, labels, out, gradient, factor, weight)
        kept, at = (labels != IGNORE_INDEX).to(self.dtype), labels.clamp(min=0).unsqueeze(1)
        soft, smoothing = self._softmax(raw, at), self.options.label_smoothing
        lse = soft.lse
        loss = lse - (1 - smoothing) * soft.picked - smoothing * soft.mean + self.options.z_loss * lse.square()
        torch.mul(loss * kept, factor, out=out)
        if not gradient:
            return None
        by = kept * factor if weight is None else kept * factor * weight
        return self._gradient(raw, soft, at, by, 1 + 2 * self.options.z_loss * lse)

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
        return raw if gradient else None

    # --- by torch, and by the C kernels where they are -------------------------------------------

    def _softmax(self, raw: Tensor, at: Tensor) -> _Softmax:
        """The logits as far as exp(z - max); the logits at the labels `at` [c, 1] and their mean."""
        options, z = self.options, self._wide[: raw.shape[0]]
        if self.backend == "native":
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
            self._capped[: z.shape[0]].copy_(z)
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
    """Mean of z [c]; with no label smoothing whatever is at hand"""

    @property
    def lse(self) -> Tensor:
        return self.top + self.total.log()
