"""Weights of compressed-tensors (llm-compressor, vLLM), as that library dequantises them, to the bit.

(q - zero) * scale in the dtype of the scales. `pack-quantized` has q plus 2^(bits - 1), [outputs, inputs * bits / 32]
in words with the first input in the lowest bits, and zero points packed along the outputs; `int-quantized` and
`float-quantized` have q as it is. `mxfp4-pack-quantized` has two numbers of E2M1 a byte, the first in its lower half,
and for each 32 of them the exponent of a power of two plus 127.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.train.hub.unpack.formats import E2M1
from core.train.hub.unpack.packing import Packing
from core.train.hub.unpack.pieces import Pieces, check, columns_of, take, unfit, words


def packed(pieces: Pieces, packing: Packing, where: str, dtype: torch.dtype) -> Tensor:
    """A weight of `pack-quantized`."""
    stored, shape = words(pieces, "weight_packed", where), take(pieces, "weight_shape", where).tolist()
    if len(shape) != 2 or stored.shape != (shape[0], -(-shape[1] * packing.bits // 32)):
        raise unfit(where, f"weight_packed is {list(stored.shape)}, and weight_shape says {shape}")
    values = columns_of(stored, packing.bits)[:, : shape[1]] - 2 ** (packing.bits - 1)
    zeros = None
    if "weight_zero_point" in pieces:
        along = columns_of(words(pieces, "weight_zero_point", where).t().contiguous(), packing.bits)
        zeros = along[:, : shape[0]].t() - 2 ** (packing.bits - 1)
    return _scaled(values, zeros, pieces, packing, where).to(dtype)


def mxfp4(pieces: Pieces, where: str, dtype: torch.dtype) -> Tensor:
    """A weight of `mxfp4-pack-quantized`."""
    stored, scale = take(pieces, "weight_packed", where), take(pieces, "weight_scale", where)
    if stored.dtype != torch.uint8 or scale.dtype != torch.uint8 or stored.dim() != 2:
        raise unfit(where, f"weight_packed is {stored.dtype} {list(stored.shape)}, weight_scale {scale.dtype}")
    rows, half = stored.shape
    check(where, "weight_scale", scale, (rows, half // 16))
    table = torch.tensor(E2M1)
    values = torch.stack((table[(stored & 15).long()], table[(stored >> 4).long()]), dim=-1).view(rows, -1)
    return torch.ldexp(values, (scale.int() - 127).repeat_interleave(32, 1)).to(dtype)


def plain(pieces: Pieces, packing: Packing, where: str, dtype: torch.dtype) -> Tensor:
    """A weight of `int-quantized`, `float-quantized` or `naive-quantized`."""
    values = take(pieces, "weight", where)
    if values.dim() != 2 or values.element_size() != 1:
        raise unfit(where, f"it is {values.dtype} {list(values.shape)}, and not a matrix of 8 bits")
    return _scaled(values, pieces.get("weight_zero_point"), pieces, packing, where).to(dtype)


def _scaled(values: Tensor, zeros: Tensor | None, pieces: Pieces, packing: Packing, where: str) -> Tensor:
    scale, (rows, columns) = take(pieces, "weight_scale", where), values.shape
    if "weight_g_idx" in pieces:
        raise unfit(where, "its columns are in an order of their own (weight_g_idx)")
    if packing.block is not None:
        high, wide = packing.block
        check(where, "weight_scale", scale, (-(-rows // high), -(-columns // wide)))
        spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return values.to(scale.dtype) * spread
    groups = scale.numel() // rows if scale.numel() % rows == 0 else 0
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif groups < 1 or columns % groups or groups not in (1, columns // packing.group if packing.group > 0 else 1):
        raise unfit(where, f"weight_scale is {list(scale.shape)}, which does not divide {columns} inputs")
    else:
        scale = scale.reshape(rows, groups).repeat_interleave(columns // groups, 1)
    found = values.to(scale.dtype)
    if zeros is not None:
        if zeros.numel() not in (1, rows * max(1, groups)):
            raise unfit(where, f"weight_zero_point is {list(zeros.shape)}")
        wide = columns // max(1, groups)
        zeros = zeros.reshape(1, 1) if zeros.numel() == 1 else zeros.reshape(rows, -1).repeat_interleave(wide, 1)
        found = found - zeros.to(scale.dtype)
    return found * scale
