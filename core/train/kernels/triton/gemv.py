"""y = x·Wᵀ for a few rows of x, straight from the packed weight: what generation does for every token.

Such a product is bound by the weight's bytes. Dense, they are written and read again: eight times what NF4 has. Here
each is read once, and nothing is written but y. Sums are in float32 in an order that depends on the shapes alone; the
unpacked values are not rounded to x's dtype first, so y is a little closer to the exact product than that of the dense
weight, and equal to it only within that rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.train.kernels.format import FEW_ROWS
from core.train.kernels.triton import int8, nf4
from core.train.kernels.triton.case import Case
from core.train.kernels.triton.launch import on, warps
from core.train.kernels.triton.nf4 import scale_of, values_of
from core.train.quant.layout import nf4_pairs

COLUMNS = 4
"""Columns of y, that is rows of W, a program; half with more than four rows of x, whose sums take registers."""
THREADS = 256
GROUP = 64
"""Elements of W that share a scale, in every weight but those that were packed otherwise elsewhere."""


@triton.jit
def _places(groups: tl.constexpr, parts: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """0, 1, 2, … as [1, 1, groups, parts, width]: a block is a group, a thread reads the last dimension at once."""
    group = tl.arange(0, groups)[None, None, :, None, None] * (parts * width)
    part = tl.arange(0, parts)[None, None, None, :, None] * width
    return group + part + tl.arange(0, width)[None, None, None, None, :]


@triton.jit
def _scales(absmax, nested, table, offset, column, start, element, n, k,  # type: ignore[no-untyped-def]
            groups: tl.constexpr, block: tl.constexpr, aligned: tl.constexpr, double: tl.constexpr):  # fmt: skip
    """Scales of the rows `column` [columns] of W for each byte, whose first elements are `element` [1, 1, groups,
    parts, width], from `start` on. Where each row begins with a block, and a group is one, there is one look-up a
    group: [1, columns, groups, 1, 1]."""
    row = column[None, :, None]
    if aligned:
        group = start // block + tl.arange(0, groups)[None, None, :]
        live = (row < n) & (group * block < k)
        found = scale_of(absmax, nested, table, offset, row * (k // block) + group, live, double)
        return found[:, :, :, None, None]
    else:
        wide = row[:, :, :, None, None]
        at = (wide.to(tl.int64) * k + element) // block
        return scale_of(absmax, nested, table, offset, at, (wide < n) & (element < k), double)


@triton.jit
def _finish(y, bias, sums, column, n, m, rows: tl.constexpr, biased: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.sum(tl.sum(sums, axis=3), axis=2)
    if biased:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    row = tl.arange(0, rows)
    live = (row < m)[:, None] & (column < n)[None, :]
    tl.store(y + row[:, None] * n + column[None, :], total.to(y.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["m"])
def _nf4(  # type: ignore[no-untyped-def]
    y, x, packed, pairs, absmax, nested, table, offset, bias, m, n, k,
    rows: tl.constexpr, columns: tl.constexpr, groups: tl.constexpr, parts: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, aligned: tl.constexpr, double: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    """`columns` columns of y a program, `groups` · `parts` · `width` bytes of each row of W at a time."""
    first = tl.program_id(0) * columns
    column = first + tl.arange(0, columns)
    packed += first.to(tl.int64) * (k // 2)
    row = tl.arange(0, rows)[:, None, None, None, None]
    across = tl.arange(0, columns)[None, :, None, None, None]
    byte = _places(groups, parts, width)
    element = _places(groups, parts, 2 * width)
    sums = tl.zeros((rows, columns, groups, parts), dtype=tl.float32)
    for start in range(0, k // 2, groups * parts * width):
        live = (first + across < n) & (start + byte < k // 2)
        even, odd = values_of(pairs, tl.load(packed + across * (k // 2) + (start + byte), mask=live, other=0))
        scale = _scales(
            absmax, nested, table, offset, column, 2 * start, 2 * (start + byte), n, k, groups, block, aligned, double
        )
        some = (row < m) & (2 * start + element < k)
        given = tl.load(x + row * k + (2 * start + element), mask=some, other=0.0).to(tl.float32)
        left, right = tl.split(tl.reshape(given, (rows, 1, groups, parts, width, 2)))
        sums += tl.sum(left * (even * scale) + right * (odd * scale), axis=4)
    _finish(y, bias, sums, column, n, m, rows, biased)


@triton.jit(do_not_specialize=["m"])
def _int8(  # type: ignore[no-untyped-def]
    y, x, packed, absmax, bias, m, n, k,
    rows: tl.constexpr, columns: tl.constexpr, groups: tl.constexpr, parts: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, aligned: tl.constexpr, biased: tl.constexpr,
):  # fmt: skip
    """As `_nf4`, with a byte an element."""
    first = tl.program_id(0) * columns
    column = first + tl.arange(0, columns)
    packed += first.to(tl.int64) * k
    row = tl.arange(0, rows)[:, None, None, None, None]
    across = tl.arange(0, columns)[None, :, None, None, None]
    element = _places(groups, parts, width)
    sums = tl.zeros((rows, columns, groups, parts), dtype=tl.float32)
    for start in range(0, k, groups * parts * width):
        live = (first + across < n) & (start + element < k)
        values = tl.load(packed + across * k + (start + element), mask=live, other=0).to(tl.float32)
        scale = _scales(
            absmax, absmax, absmax, absmax, column, start, start + element, n, k, groups, block, aligned, False
        )
        some = (row < m) & (start + element < k)
        given = tl.load(x + row * k + (start + element), mask=some, other=0.0).to(tl.float32)
        sums += tl.sum(given * (values * (scale * (1.0 / 127.0))), axis=4)
    _finish(y, bias, sums, column, n, m, rows, biased)


def serves(x: Tensor, format: str) -> bool:
    """Whether `multiply` takes x [m, k]: a row of NF4 has to begin with a whole byte."""
    m, k = x.shape
    fits = 0 < m <= FEW_ROWS and k > 0 and (k % 2 == 0 or format != "nf4")
    return fits and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def multiply(
    x: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int, n: int, bias: Tensor | None
) -> Tensor:
    """x [m, k] of bfloat16, float16 or float32 times a packed weight [n, k]: y [m, n] in x's dtype. `block` is a power
    of two."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    a_byte, width = (2, 4) if format == "nf4" else (1, 8)  # elements of a byte; bytes that a thread reads at once
    parts = GROUP // (a_byte * width)
    groups = max(1, min(THREADS // parts, triton.next_power_of_2(triton.cdiv(k, GROUP))))
    columns = COLUMNS if m <= 4 else COLUMNS // 2
    launched = {
        "rows": triton.next_power_of_2(m), "columns": columns, "groups": groups, "parts": parts, "width": width,
        "block": block, "aligned": block == GROUP and k % GROUP == 0, "biased": bias is not None,
        "num_warps": warps(THREADS), "num_stages": 1, "enable_fp_fusion": True,
    }  # fmt: skip
    x, packed = x.contiguous(), packed.contiguous()
    given = y if bias is None else bias  # an address that is not read stands for none
    grid = (triton.cdiv(n, columns),)
    with on(x):
        if format == "nf4":
            absmax, nested, table, offset = scales if len(scales) == 4 else (scales[0],) * 4
            _nf4[grid](
                y, x, packed, nf4_pairs(x.device), absmax, nested, table, offset, given, m, n, k,
                double=len(scales) == 4, **launched,
            )  # fmt: skip
        else:
            _int8[grid](y, x, packed, scales[0], given, m, n, k, **launched)
    return y


def cases() -> list[Case]:
    def case(name: str, format: str, m: int) -> Case:
        x = torch.empty(m, 4096, dtype=torch.bfloat16, device="meta")
        weight = nf4.meta(14336, 4096) if format == "nf4" else int8.meta(14336, 4096)
        return Case(f"gemv {name}", lambda: multiply(x, *weight, format, 64, 14336, None))

    return [
        case("nf4, 1 row", "nf4", 1),
        case("nf4, 8 rows", "nf4", 8),
        case("int8, 1 row", "int8", 1),
        case("int8, 8 rows", "int8", 8),
    ]
