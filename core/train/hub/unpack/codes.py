"""Weights of HQQ and AQLM as those libraries dequantise them, to the bit.

HQQ     (q - zero) * scale in the dtype of the file's `compute_dtype`; q in bytes (3 bits: words of ten), the first
        part of the rows in the highest bits; then reshaped
AQLM    for each group of weights the sum of one entry of each codebook, times a scale of its outputs
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from core.train.hub.unpack.packing import Packing
from core.train.hub.unpack.pieces import Pieces, check, take, unfit

PACKINGS = {"8bit_u8": 8, "4bit_u8": 4, "3bit_32": 3, "2bit_u8": 2, "1bit_u8": 1}
"""Bits of the arrangements of HQQ."""


def hqq(pieces: Pieces, where: str, dtype: torch.dtype) -> Tensor:
    """A weight of HQQ with `axis` 0 or 1."""
    shape = tuple(take(pieces, "shape", where).tolist())
    kind, bits = _text(pieces, "packing", where), 0
    if kind not in PACKINGS or (bits := PACKINGS[kind]) != int(take(pieces, "nbits", where)):
        raise unfit(where, f"`packing` is {kind} and `nbits` {int(take(pieces, 'nbits', where))}")
    if int(take(pieces, "quant_scale", where)) or int(take(pieces, "quant_zero", where)):
        raise unfit(where, "its scales are quantised themselves")
    computed = {"torch.float16": torch.float16, "torch.bfloat16": torch.bfloat16, "torch.float32": torch.float32}
    named = _text(pieces, "compute_dtype", where)
    if named not in computed or len(shape) != 2:
        raise unfit(where, f"`compute_dtype` is {named} and `shape` {list(shape)}")
    stored, zero, scale = (take(pieces, name, where) for name in ("W_q", "zero", "scale"))
    stored = stored.view(torch.int32 if bits == 3 else torch.uint8)
    mask, count = 2**bits - 1, 10 if bits == 3 else 8 // bits
    values = torch.cat([(stored >> (bits * place)) & mask for place in reversed(range(count))])
    rows, left = divmod(shape[0] * shape[1], max(1, values.shape[1]))
    if left or not 0 <= values.shape[0] - rows < count:
        raise unfit(where, f"W_q holds {values.numel()} values, and its shape is {list(shape)}")
    values = values[:rows]
    try:
        found = (values.to(computed[named]) - zero) * scale
    except RuntimeError as error:
        raise unfit(where, f"scales {list(scale.shape)} do not fit values {list(values.shape)}") from error
    return found.reshape(shape).to(dtype)


def aqlm(pieces: Pieces, packing: Packing, where: str, dtype: torch.dtype) -> Tensor:
    """A weight of AQLM."""
    codes, books, scales = (take(pieces, name, where) for name in ("codes", "codebooks", "scales"))
    if codes.dim() != 3 or books.dim() != 4 or codes.is_floating_point():
        raise unfit(where, f"codes are {list(codes.shape)} and codebooks {list(books.shape)}")
    high, wide, count = codes.shape
    check(where, "codebooks", books, (count, 2**packing.bits, *books.shape[2:]))
    check(where, "scales", scales, (high, 1, 1, 1))
    places = codes.long() % 2**packing.bits + torch.arange(count) * 2**packing.bits
    summed = functional.embedding_bag(places.flatten(0, -2), books.flatten(0, 1).flatten(-2, -1), mode="sum")
    grouped = summed.view(high, wide, *books.shape[2:]).mul(scales)
    return grouped.swapaxes(-3, -2).reshape(high * books.shape[2], wide * books.shape[3]).to(dtype)


def _text(pieces: Pieces, name: str, where: str) -> str:
    return bytes(take(pieces, name, where).to(torch.uint8).tolist()).decode("ascii", "replace")
