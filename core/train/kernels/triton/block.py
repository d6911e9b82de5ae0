"""RMS norm, the gated activation and rotary embedding with their gradients: rows, or elements, are read once and
written once.

The arithmetic is float32, rounded where the eager formulas round it, as in the C kernels (native.c). A row is summed up
by the threads of one program in an order that its width alone decides. Formulas of eager PyTorch take five to ten
launches and as many passes over memory, which is all that they cost on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from core.train.kernels.triton.case import Case
from core.train.kernels.triton.launch import on, warps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 1 << 15
"""Numbers of a row that a program keeps in its registers."""
THREADS = 256
PER_THREAD = 8
"""Neighbouring numbers that a thread reads together: 16 bytes in 16 bits."""


@triton.jit
def _gain(weight, column, live, from_one: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a normalised number is multiplied by, [1, columns]."""
    found = tl.load(weight + column, mask=live, other=0.0).to(tl.float32)
    if from_one:
        found += 1.0
    return found


@triton.jit
def _rounded(values, like, enabled: tl.constexpr):  # type: ignore[no-untyped-def]
    return values.to(like.dtype.element_ty).to(tl.float32) if enabled else values


@triton.jit(do_not_specialize=["rows", "eps"])
def _norm(  # type: ignore[no-untyped-def]
    out, scale, x, weight, eps, rows, width, from_one: tl.constexpr, each: tl.constexpr, columns: tl.constexpr
):
    """`each` rows a program; `scale` is kept for the gradient."""
    first = tl.program_id(0) * each
    out += first.to(tl.int64) * width  # past 2^31 elements; within a program 32 bits are enough
    x += first.to(tl.int64) * width
    row, column = tl.arange(0, each), tl.arange(0, columns)[None, :]
    there = first + row < rows
    live = there[:, None] & (column < width)
    at = row[:, None] * width + column
    values = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    by = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / width + eps)
    tl.store(scale + first + row, by, mask=there)
    normed = _rounded(values * by[:, None], out, not from_one)
    tl.store(out + at, (normed * _gain(weight, column, column < width, from_one)).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _norm_grad(  # type: ignore[no-untyped-def]
    grad_x, grad, x, weight, scale, rows, width, from_one: tl.constexpr, each: tl.constexpr, columns: tl.constexpr
):
    first = tl.program_id(0) * each
    grad_x += first.to(tl.int64) * width
    grad += first.to(tl.int64) * width
    x += first.to(tl.int64) * width
    row, column = tl.arange(0, each), tl.arange(0, columns)[None, :]
    there = first + row < rows
    live = there[:, None] & (column < width)
    at = row[:, None] * width + column
    values = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    above = tl.load(grad + at, mask=live, other=0.0).to(tl.float32)
    above = _rounded(above * _gain(weight, column, column < width, from_one), grad_x, not from_one)
    by = tl.load(scale + first + row, mask=there, other=0.0)
    along = tl.sum(above * values, axis=1) * by * by * by / width
    found = above * by[:, None] - values * along[:, None]
    tl.store(grad_x + at, found.to(grad_x.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["last"])
def _gate(out, gate, up, last, rest, each: tl.constexpr):  # type: ignore[no-untyped-def]
    """`each` numbers a program; `rest` are left for the `last` one."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * each
    at = tl.arange(0, each)
    live = at < tl.where(program == last, rest, each)
    g = tl.load(gate + start + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + start + at, mask=live, other=0.0).to(tl.float32)
    opened = _rounded(g / (1.0 + tl.exp(-g)), out, True)
    tl.store(out + start + at, (opened * u).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["last"])
def _gate_grad(grad_gate, grad_up, grad, gate, up, last, rest, each: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    start = program.to(tl.int64) * each
    at = tl.arange(0, each)
    live = at < tl.where(program == last, rest, each)
    g = tl.load(gate + start + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + start + at, mask=live, other=0.0).to(tl.float32)
    above = tl.load(grad + start + at, mask=live, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-g))
    of_up = above * _rounded(g * share, grad_up, True)
    of_gate = _rounded(above * u, grad_up, True) * (share * (1.0 + g * (1.0 - share)))
    tl.store(grad_up + start + at, of_up.to(grad_up.dtype.element_ty), mask=live)
    tl.store(grad_gate + start + at, of_gate.to(grad_gate.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["tokens", "lines"])
def _turn(  # type: ignore[no-untyped-def]
    out, x, cosine, sine, heads, tokens, lines, half, back: tl.constexpr, each: tl.constexpr, columns: tl.constexpr
):
    """A program for the angles of a token, with which it turns all heads of the tokens there in `lines` lines."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, columns)[None, :]
    known, angle = column < half, token * (2 * half) + column
    low_cosine = tl.load(cosine + angle, mask=known, other=0.0).to(tl.float32)
    high_cosine = tl.load(cosine + angle + half, mask=known, other=0.0).to(tl.float32)
    low_sine = tl.load(sine + angle, mask=known, other=0.0).to(tl.float32)
    high_sine = tl.load(sine + angle + half, mask=known, other=0.0).to(tl.float32)
    if back:
        low_sine, high_sine = -high_sine, -low_sine
    for line in range(lines):
        for start in range(0, heads, each):
            head = start + tl.arange(0, each)
            live = (head < heads)[:, None] & known
            at = ((line * tokens + token) * heads + head)[:, None] * (2 * half) + column
            low = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
            high = tl.load(x + at + half, mask=live, other=0.0).to(tl.float32)
            from_high, from_low = _rounded(high * low_sine, out, True), _rounded(low * high_sine, out, True)
            low, high = _rounded(low * low_cosine, out, True), _rounded(high * high_cosine, out, True)
            tl.store(out + at, (low - from_high).to(out.dtype.element_ty), mask=live)
            tl.store(out + at + half, (high + from_low).to(out.dtype.element_ty), mask=live)


# --- what they compute -----------------------------------------------------------------------------


def norm(out: Tensor, scale: Tensor, x: Tensor, weight: Tensor, eps: float, from_one: bool) -> None:
    """`core.train.kernels.native.norm`, of rows of at most WIDEST numbers; all contiguous, of one dtype of DTYPES."""
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if rows:
        grid, shape = _rows(rows, width)
        with on(x):
            _norm[grid](out, scale, x, weight, eps, rows, width, from_one=from_one, enable_fp_fusion=True, **shape)


def norm_grad(grad_x: Tensor, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, from_one: bool) -> None:
    """Fill `grad_x` with the gradient of x in `norm`."""
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    if rows:
        grid, shape = _rows(rows, width)
        with on(x):
            _norm_grad[grid](
                grad_x, grad, x, weight, scale, rows, width, from_one=from_one, enable_fp_fusion=True, **shape
            )


def gate(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """Fill `out` with silu(gate) · up."""
    if out.numel():
        grid, last, rest = _pieces(out.numel())
        with on(out):
            _gate[grid](
                out, gate, up, last, rest,
                each=THREADS * PER_THREAD, num_warps=warps(THREADS), num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip


def gate_grad(grad_gate: Tensor, grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Fill `grad_gate` and `grad_up` with the gradients of `gate`."""
    if grad.numel():
        grid, last, rest = _pieces(grad.numel())
        with on(grad):
            _gate_grad[grid](
                grad_gate, grad_up, grad, gate, up, last, rest,
                each=THREADS * PER_THREAD, num_warps=warps(THREADS), num_stages=1, enable_fp_fusion=True,
            )  # fmt: skip


def turn(out: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> None:
    """`core.train.kernels.native.turn`; all contiguous, of one dtype of DTYPES."""
    lines, tokens, heads, width = x.shape
    if x.numel():
        columns = triton.next_power_of_2(width // 2)
        each = max(1, min(triton.next_power_of_2(heads), THREADS * PER_THREAD // columns))
        with on(x):
            _turn[(len(cosine) * tokens,)](
                out, x, cosine, sine, heads, tokens, lines // len(cosine), width // 2, back=back, each=each,
                columns=columns, num_warps=warps(THREADS), num_stages=1, enable_fp_fusion=False,
            )  # fmt: skip


def _rows(rows: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """Grid and shape of programs that each take as many whole rows as their threads read at once."""
    columns = triton.next_power_of_2(width)
    threads = THREADS if columns <= 4 * THREADS * PER_THREAD else 4 * THREADS
    each = max(1, THREADS * PER_THREAD // columns)
    return (triton.cdiv(rows, each),), {
        "each": each, "columns": columns, "num_warps": warps(threads), "num_stages": 1,
    }  # fmt: skip


def _pieces(count: int) -> tuple[tuple[int], int, int]:
    programs = triton.cdiv(count, THREADS * PER_THREAD)
    return (programs,), programs - 1, count - (programs - 1) * THREADS * PER_THREAD


# --- for the compiler without a card ---------------------------------------------------------------


def cases() -> list[Case]:
    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    def both(name: str, width: int, dtype: torch.dtype, from_one: bool = False) -> list[Case]:
        x, weight, scale = some(4096, width, dtype=dtype), some(width, dtype=dtype), some(4096, dtype=torch.float32)
        return [
            Case(f"norm {name}", lambda: norm(x, scale, x, weight, 1e-6, from_one)),
            Case(f"norm {name}, gradient", lambda: norm_grad(x, x, x, weight, scale, from_one)),
        ]

    def gates(name: str, dtype: torch.dtype) -> list[Case]:
        x = some(4096, 14336, dtype=dtype)
        return [
            Case(f"gate {name}", lambda: gate(x, x, x)),
            Case(f"gate {name}, gradient", lambda: gate_grad(x, x, x, x, x)),
        ]

    def turns(name: str, width: int, dtype: torch.dtype) -> list[Case]:
        x, angles = some(2, 2048, 32, width, dtype=dtype), some(1, 2048, width, dtype=dtype)
        return [
            Case(f"turn {name}", lambda: turn(x, x, angles, angles, False)),
            Case(f"turn {name}, gradient", lambda: turn(x, x, angles, angles, True)),
        ]

    return [
        *turns("bfloat16", 128, torch.bfloat16),
        *turns("float32", 64, torch.float32),
        *both("bfloat16", 4096, torch.bfloat16),
        *both("bfloat16, of heads", 128, torch.bfloat16),
        *both("bfloat16, from one, wide", 16384, torch.bfloat16, from_one=True),
        *both("float32", 4096, torch.float32),
        *gates("bfloat16", torch.bfloat16),
        *gates("float32", torch.float32),
    ]
