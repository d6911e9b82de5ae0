"""NF4: quantise and dequantise, equal to bitsandbytes bit for bit (its CPU arithmetic; tests/kernels/test_nf4.py)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from core.plan.constants import NESTED_BLOCK, QUANT_BLOCK
from core.train.quant.layout import (
    NF4Weight,
    dynamic_map,
    nf4_bounds,
    nf4_pairs,
)

SMALLEST = 1e-38
"""Stands in for the absmax of a block of zeros, so that nothing is divided by zero."""
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_CHUNK = 1 << 20
"""Elements quantised at once: a large weight needs no second copy of itself in float32."""


def quantize_nf4(weight: Tensor, block: int = QUANT_BLOCK, double: bool = True) -> NF4Weight:
    """Quantise a float32, bfloat16 or float16 tensor of any shape. ValueError when it is of another dtype, or when a
    value is NaN or infinite: its whole block would be lost without a word."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"NF4 is made from float32, bfloat16 or float16, not from {weight.dtype}")
    if block not in BLOCK_SIZES:
        raise ValueError(f"a block has 32 to 4096 elements, a power of two; not {block}")
    if weight.numel() == 0:
        raise ValueError("the weight is empty")
    flat = weight.detach().reshape(-1)
    codes, scales = [], []
    for start in range(0, flat.numel(), _CHUNK):
        piece, absmax = _quantize_piece(flat[start : start + _CHUNK].float(), block)
        codes.append(piece)
        scales.append(absmax)
    absmax = torch.cat(scales)
    if not torch.isfinite(absmax).all():
        raise ValueError("the weight holds NaN or infinite values")
    packed = torch.cat(codes).unsqueeze(1)
    shape = tuple(weight.shape)
    if not double:
        return NF4Weight(packed, absmax, None, None, None, shape, weight.dtype, block)
    offset = absmax.mean()
    if not torch.isfinite(offset):
        raise ValueError("the mean of its blocks' largest values is past float32's range")
    absmax8, nested = _quantize_dynamic(absmax - offset)
    return NF4Weight(packed, absmax8, nested, dynamic_map(weight.device), offset, shape, weight.dtype, block)


def dequantize_nf4_into(out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    """Fill the flat `out` [n]. Alternatives measured on 2 Zen 4 cores for 1536 × 576 to bfloat16, best of 15: this (one
    int32 look-up of a byte's two values) 0.35 ms, `torch.take` (int64) 0.50, an embedding 0.58, two look-ups with fresh
    buffers 5.1, bitsandbytes' C++ 0.11, the product it feeds (1024 tokens) 23."""
    n = out.numel()
    absmax = resolve_absmax(scales)
    pairs = torch.index_select(nf4_pairs(packed.device), 0, packed.reshape(-1).int())
    values = pairs.view(torch.float32)[:n]
    full = n // block * block
    blocks = values[:full].view(-1, block)
    blocks.mul_(absmax[: full // block].unsqueeze(1))
    if full < n:
        values[full:].mul_(absmax[-1])
    out.copy_(values)


def resolve_absmax(scales: list[Tensor]) -> Tensor:
    """float32 [blocks]: map[absmax8] · nested_absmax[i // 256] + offset, the product rounded before the sum."""
    if len(scales) == 1:
        return scales[0]
    absmax8, nested, table, offset = scales
    values = torch.index_select(table, 0, absmax8.int())
    full = values.numel() // NESTED_BLOCK * NESTED_BLOCK
    values[:full].view(-1, NESTED_BLOCK).mul_(nested[: full // NESTED_BLOCK].unsqueeze(1))
    if full < values.numel():
        values[full:].mul_(nested[-1])
    return values.add_(offset)


def _quantize_piece(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Packed bytes and absmax of a flat float32 piece. The last, shorter block is divided by its absmax, the others are
    multiplied by its reciprocal: that is how bitsandbytes rounds."""
    n = values.numel()
    full = n // block * block
    rows = values[:full].view(-1, block)
    absmax = rows.abs().amax(dim=1)
    scaled = (rows * (1.0 / absmax.clamp(min=SMALLEST)).unsqueeze(1)).clamp_(-1, 1).view(-1)
    if full < n:
        rest = values[full:]
        last = rest.abs().amax().clamp(min=SMALLEST)
        absmax = torch.cat([absmax, last.unsqueeze(0)])
        scaled = torch.cat([scaled, (rest / last).clamp_(-1, 1)])
    if n % 2:
        scaled = torch.nn.functional.pad(scaled, (0, 1))
    index = torch.bucketize(scaled, nf4_bounds(values.device), out_int32=True).to(torch.uint8)
    return (index[::2] << 4) | index[1::2], absmax


def _quantize_dynamic(values: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 codes [n] of the dynamic map, and the largest magnitude of every 256 values (float32).

    bitsandbytes' CPU code does not search the map's 256 values: it rounds to one of 65,536 places between -1 and 1 and
    looks the nearest code up there, and a group of zeros gets code 0. Both are kept, so that files are equal.
    """
    n = values.numel()
    padded = torch.nn.functional.pad(values, (0, -n % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    absmax = padded.abs().amax(dim=1)
    scaled = (padded * (1.0 / absmax.clamp(min=SMALLEST)).unsqueeze(1)).clamp_(-1, 1)
    place = scaled.add_(1.0).mul_(_PLACES / 2).add_(0.5).to(torch.int32)
    codes = torch.index_select(_dynamic_codes(values.device), 0, place.view(-1)).view_as(padded)
    codes[absmax == 0] = 0
    return codes.view(-1)[:n].clone(), absmax


_PLACES = 65535


@cache
def _dynamic_codes(device: torch.device) -> Tensor:
    """uint8 [65536]: the code nearest to each place."""
    table = dynamic_map(torch.device("cpu")).double()
    places = torch.arange(_PLACES + 1, dtype=torch.float64) / (_PLACES / 2) - 1
    return torch.bucketize(places, (table[:-1] + table[1:]) / 2).to(torch.uint8).to(device)
