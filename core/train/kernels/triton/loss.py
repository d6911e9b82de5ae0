"""Cross-entropy over a chunk of logits and, in place, its gradient: one program a row, logits read twice.

    z = soft-cap(scale · (x + b)),   soft-cap(z) = cap · tanh(z / cap)
    loss = (1 - s) · (lse(z) - z[y]) + s · (lse(z) - mean(z)) + z_loss · lse(z)²

(`core.train.loss.linear_cross_entropy` has the names). The first pass finds each lane's maximum and its sum of
exponentials together (Milakov and Gimelshein 2018, arXiv:1805.02867), the second writes d loss / d x over the logits.
All arithmetic is float32, rounded once when it is stored. Log-probabilities are the plain loss with its sign turned.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.train.batch import IGNORE_INDEX
from core.train.kernels.triton.case import Case
from core.train.kernels.triton.launch import on, warps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 64
"""Rows of logits are this many elements apart, or a multiple: then every load is 16 bytes a lane, whatever the
vocabulary, and so are those of the matrix products around the kernel."""
LANES = 512
"""Threads of a program."""
PER_LANE = 8
"""Neighbouring logits that one of them reads together: 16 bytes in 16 bits."""


def loss_rows_(
    logits: Tensor,
    vocabulary: int,
    labels: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    weight: Tensor | None = None,
    factor: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    gradient: bool,
) -> None:
    """out[i] = factor · loss of row i, 0 where its label is IGNORE_INDEX; with `gradient`, logits[i] becomes
    factor · weight[i] · d loss / d logits[i], in place.

    logits [c, width] contiguous, bfloat16, float16 or float32, of which the first `vocabulary` columns count (what the
    others hold does not matter, and they are not defined afterwards); labels int64 [c]; out and weight float32 [c];
    bias [vocabulary]. A label outside the vocabulary makes the loss NaN.
    """
    rows, width = logits.shape
    if rows == 0:
        return
    with on(logits):
        _loss_rows[(rows,)](
            logits, labels, out, bias, weight, width, vocabulary,
            factor, scale, softcap, label_smoothing or None, z_loss,
            gradient=gradient, ignore=IGNORE_INDEX, lanes=LANES, per_lane=PER_LANE,
            num_warps=warps(LANES), num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip


def padded(vocabulary: int) -> int:
    """Columns that a buffer for such logits should have."""
    return int(triton.cdiv(vocabulary, ALIGNMENT)) * ALIGNMENT


@triton.jit
def _logits(raw, bias, column, inside, scale, softcap):  # type: ignore[no-untyped-def]
    """z, -inf outside the vocabulary."""
    z = raw.to(tl.float32)
    if bias is not None:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    z *= scale
    if softcap is not None:
        small = tl.exp(tl.abs(z) * (-2.0 / softcap))  # tanh without an overflow
        capped = softcap * (1.0 - small) / (1.0 + small)
        z = tl.where(z < 0, -capped, capped)
    return tl.where(inside, z, float("-inf"))


@triton.jit(do_not_specialize=["vocabulary"])
def _loss_rows(  # type: ignore[no-untyped-def]
    logits, labels, out, bias, weight, width, vocabulary, factor, scale, softcap, smoothing, z_loss,
    gradient: tl.constexpr, ignore: tl.constexpr, lanes: tl.constexpr, per_lane: tl.constexpr,
):  # fmt: skip
    """A bias, weight, cap or smoothing of None is not there, and costs nothing."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * width  # past 2^31 elements; within a row 32 bits are enough
    at = tl.arange(0, lanes)[:, None] * per_lane + tl.arange(0, per_lane)[None, :]
    label = tl.load(labels + row)
    if label == ignore:
        tl.store(out + row, 0.0)
        if gradient:
            nothing = tl.zeros([lanes, per_lane], dtype=logits.dtype.element_ty)
            for start in range(0, vocabulary, lanes * per_lane):
                tl.store(logits + start + at, nothing, mask=start + at < width)
    else:
        known = (label >= 0) & (label < vocabulary)
        picked = _logits(tl.load(logits + label, mask=known, other=0.0), bias, label, known, scale, softcap)
        picked = tl.where(known, picked, float("nan"))

        # Each lane's maximum starts as the label's logit, so that this is read before anything is overwritten.
        top = tl.zeros([lanes], dtype=tl.float32) + picked
        total = tl.zeros([lanes], dtype=tl.float32)
        plain = tl.zeros([lanes], dtype=tl.float32)
        for start in range(0, vocabulary, lanes * per_lane):
            column = start + at
            raw = tl.load(logits + column, mask=column < width, other=0.0)
            z = _logits(raw, bias, column, column < vocabulary, scale, softcap)
            higher = tl.maximum(top, tl.max(z, axis=1))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), axis=1)
            top = higher
            if smoothing is not None:
                plain += tl.sum(tl.where(column < vocabulary, z, 0.0), axis=1)
        highest = tl.max(top, axis=0)
        sum_exp = tl.sum(total * tl.exp(top - highest), axis=0)
        lse = highest + tl.log(sum_exp)
        loss = lse - picked + z_loss * lse * lse
        if smoothing is not None:
            loss += smoothing * (picked - tl.sum(plain, axis=0) / vocabulary)
        tl.store(out + row, factor * loss)

        if gradient:
            if weight is not None:
                factor *= tl.load(weight + row)
            of_softmax = factor * (1.0 + 2.0 * z_loss * lse) / sum_exp
            for start in range(0, vocabulary, lanes * per_lane):
                column = start + at
                inside = column < vocabulary
                raw = tl.load(logits + column, mask=column < width, other=0.0)
                z = _logits(raw, bias, column, inside, scale, softcap)
                slope = of_softmax * tl.exp(z - highest)
                if smoothing is not None:
                    slope -= factor * (smoothing / vocabulary)
                    slope -= tl.where(column == label, factor * (1.0 - smoothing), 0.0)
                else:
                    slope -= tl.where(column == label, factor, 0.0)
                if softcap is not None:
                    share = z * (1.0 / softcap)
                    slope *= tl.where(inside, 1.0 - share * share, 0.0)
                slope *= scale
                tl.store(logits + column, slope.to(logits.dtype.element_ty), mask=column < width)


# --- for the compiler without a card ---------------------------------------------------------------


def cases() -> list[Case]:
    """Launches on tensors of real sizes, without memory behind them."""

    def launch(dtype: torch.dtype, vocabulary: int, *, gradient: bool = True, everything: bool = False) -> None:
        def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        rows = 256
        loss_rows_(
            some(rows, padded(vocabulary), dtype=dtype),
            vocabulary,
            some(rows, dtype=torch.int64),
            some(rows),
            gradient=gradient,
            bias=some(vocabulary, dtype=dtype) if everything else None,
            weight=some(rows) if everything else None,
            softcap=30.0 if everything else None,
            label_smoothing=0.1 if everything else 0.0,
        )

    return [
        Case("loss bfloat16", lambda: launch(torch.bfloat16, 128_256)),
        Case("loss bfloat16, no gradient", lambda: launch(torch.bfloat16, 128_256, gradient=False)),
        Case("loss bfloat16, every option", lambda: launch(torch.bfloat16, 262_144, everything=True)),
        Case("loss float16", lambda: launch(torch.float16, 151_669)),
        Case("loss float32", lambda: launch(torch.float32, 50_257)),
    ]
