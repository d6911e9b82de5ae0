"""NF4 to dense: both levels of scales are resolved in registers, the values are rounded once.

A byte is turned into its two values by one look-up of eight bytes in a table of 256 pairs (2 KiB, so in the cache
next to the lanes). A tree of selects needs 2.5 times the code on gfx942.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.train.kernels.triton.case import Case
from core.train.kernels.triton.launch import on, warps
from core.train.quant.layout import nf4_pairs

THREADS = 256
STORE = 16
"""Bytes that each of a program's THREADS threads writes at once; it reads those that make them: 4 for bfloat16."""


@triton.jit
def scale_of(absmax, nested, table, offset, block, live, double: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 scales of the blocks `block`; where not `live`, any finite number. The product is rounded before the sum,
    as in `core.train.quant.nf4.resolve_absmax`, where the launch forbids fusing the two."""
    if double:
        code = tl.load(absmax + block, mask=live, other=0).to(tl.int32)
        group = tl.load(nested + block // 256, mask=live, other=0.0)
        return tl.load(table + code) * group + tl.load(offset)
    else:
        return tl.load(absmax + block, mask=live, other=0.0)


@triton.jit
def values_of(pairs, packed):  # type: ignore[no-untyped-def]
    """The float32 values of each byte: of its high nibble, and of its low one."""
    pair = tl.load(pairs + packed.to(tl.int32))
    return pair.to(tl.int32).to(tl.float32, bitcast=True), (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["last"])
def _dequantize(  # type: ignore[no-untyped-def]
    out, packed, pairs, absmax, nested, table, offset, last, rest, rest_bytes,
    half: tl.constexpr, blocks: tl.constexpr, double: tl.constexpr,
):  # fmt: skip
    """`blocks` blocks of 2·half elements a program; `rest` elements, in `rest_bytes`, are left for the `last` program.
    Both are counted from the program's first one, so that only its place needs 64 bits."""
    program = tl.program_id(0)
    left = tl.where(program == last, rest, 2 * half * blocks)
    left_bytes = tl.where(program == last, rest_bytes, half * blocks)
    out += program.to(tl.int64) * (2 * half * blocks)
    packed += program.to(tl.int64) * (half * blocks)

    row = tl.arange(0, blocks)
    scale = scale_of(absmax, nested, table, offset, program * blocks + row, row * half < left_bytes, double)
    byte = row[:, None] * half + tl.arange(0, half)[None, :]
    even, odd = values_of(pairs, tl.load(packed + byte, mask=byte < left_bytes, other=0))
    values = tl.interleave(even * scale[:, None], odd * scale[:, None])
    element = row[:, None] * (2 * half) + tl.arange(0, 2 * half)[None, :]
    tl.store(out + element, values.to(out.dtype.element_ty), mask=element < left)


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    """Fill the flat `out` [n] of bfloat16, float16 or float32; the bits are those of the portable backend. `block` is a
    power of two."""
    n, half = out.numel(), block // 2
    if n == 0:
        return
    blocks = max(1, THREADS * STORE // out.element_size() // block)
    programs = triton.cdiv(n, block * blocks)
    rest = n - (programs - 1) * block * blocks
    absmax, nested, table, offset = scales if len(scales) == 4 else (scales[0],) * 4
    with on(out):
        _dequantize[(programs,)](
            out, packed.contiguous(), nf4_pairs(out.device), absmax, nested, table, offset,
            programs - 1, rest, triton.cdiv(rest, 2), half=half, blocks=blocks, double=len(scales) == 4,
            num_warps=warps(THREADS), num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def meta(n: int, k: int, double: bool = True) -> tuple[Tensor, list[Tensor]]:
    """A packed weight [n, k] without memory, in blocks of 64: what the cases of this format are about."""

    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device="meta")

    blocks = n * k // 64
    if not double:
        return empty(n * k // 2, torch.uint8), [empty(blocks, torch.float32)]
    floats = [empty(count, torch.float32) for count in (-(-blocks // 256), 256, 1)]
    return empty(n * k // 2, torch.uint8), [empty(blocks, torch.uint8), *floats]


def cases() -> list[Case]:
    def case(name: str, dtype: torch.dtype, n: int = 4096, double: bool = True) -> Case:
        out = torch.empty(n * 14336, dtype=dtype, device="meta")
        return Case(f"nf4 {name}", lambda: dequantize_into(out, *meta(n, 14336, double), 64))

    return [
        case("to bfloat16", torch.bfloat16),
        case("to float16", torch.float16),
        case("to float32", torch.float32),
        case("single to bfloat16", torch.bfloat16, double=False),
        case("to bfloat16, past 2 GiB", torch.bfloat16, n=151_936),  # other loads on AMD: no 32-bit offsets
    ]
