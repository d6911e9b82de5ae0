"""Signed bytes, a scale for each block, to dense; rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.train.kernels.triton.case import Case
from core.train.kernels.triton.launch import on, warps
from core.train.kernels.triton.nf4 import STORE, THREADS


@triton.jit(do_not_specialize=["last"])
def _dequantize(  # type: ignore[no-untyped-def]
    out, packed, absmax, last, rest, block: tl.constexpr, blocks: tl.constexpr
):
    """`blocks` blocks a program; `rest` elements are left for the `last` program."""
    program = tl.program_id(0)
    left = tl.where(program == last, rest, block * blocks)
    out += program.to(tl.int64) * (block * blocks)
    packed += program.to(tl.int64) * (block * blocks)

    row = tl.arange(0, blocks)
    step = tl.load(absmax + program * blocks + row, mask=row * block < left, other=0.0) * (1.0 / 127.0)
    element = row[:, None] * block + tl.arange(0, block)[None, :]
    values = tl.load(packed + element, mask=element < left, other=0).to(tl.float32) * step[:, None]
    tl.store(out + element, values.to(out.dtype.element_ty), mask=element < left)


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    """Fill the flat `out` [n] of bfloat16, float16 or float32; the bits are those of the portable backend. `block` is a
    power of two."""
    n = out.numel()
    if n == 0:
        return
    blocks = max(1, THREADS * STORE // out.element_size() // block)
    programs = triton.cdiv(n, block * blocks)
    with on(out):
        _dequantize[(programs,)](
            out, packed.contiguous(), scales[0], programs - 1, n - (programs - 1) * block * blocks,
            block=block, blocks=blocks, num_warps=warps(THREADS), num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip


def meta(n: int, k: int) -> tuple[Tensor, list[Tensor]]:
    """A packed weight [n, k] without memory, in blocks of 64: what the cases of this format are about."""
    packed = torch.empty(n * k, dtype=torch.int8, device="meta")
    return packed, [torch.empty(n * k // 64, dtype=torch.float32, device="meta")]


def cases() -> list[Case]:
    def case(name: str, dtype: torch.dtype) -> Case:
        out = torch.empty(4096 * 14336, dtype=dtype, device="meta")
        return Case(f"int8 to {name}", lambda: dequantize_into(out, *meta(4096, 14336), 64))

    return [case("bfloat16", torch.bfloat16), case("float16", torch.float16)]
