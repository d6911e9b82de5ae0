"""What tests have computed in the process whose Triton kernels are interpreted (tests/support/interpreter.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.interpreter import one_program

BLOCK = 64


def last_of(format: str, n: int) -> None:
    """The last program of unpacking n elements writes the end of the tensor, with the last scales, and no more."""
    from core.train.kernels.triton import nf4
    from core.train.quant.layout import dynamic_map, nf4_pairs

    tile = nf4.THREADS * nf4.STORE // 2
    programs, blocks = -(-n // tile), tile // BLOCK
    rest = n - (programs - 1) * tile
    assert 0 < rest < tile
    last = -(-rest // BLOCK)
    out = torch.empty(n, dtype=torch.bfloat16)  # the system gives pages when they are written
    out[n - rest - 8 :] = 7.0
    if format == "nf4":
        packed = torch.empty(n // 2, dtype=torch.uint8)
        packed[(n - rest) // 2 :] = 0xF0  # 1, -1
        absmax = torch.empty(-(-n // BLOCK), dtype=torch.uint8)
        absmax[-last:] = 255
        nested = torch.empty(-(-absmax.numel() // 256))
        nested[-1] = 3.0
        table, offset = dynamic_map(out.device), torch.tensor(0.5)
        one_program(
            "core.train.kernels.triton.nf4:_dequantize", programs - 1, programs,
            out, packed, nf4_pairs(out.device), absmax, nested, table, offset, programs - 1, rest, rest // 2,
            half=BLOCK // 2, blocks=blocks, double=True,
        )  # fmt: skip
        assert torch.equal(out[n - rest :].float(), torch.tensor([3.5, -3.5]).repeat(rest // 2))
    else:
        packed = torch.empty(n, dtype=torch.int8)
        packed[n - rest :] = 127
        absmax = torch.empty(-(-n // BLOCK))
        absmax[-last:] = 3.0
        one_program(
            "core.train.kernels.triton.int8:_dequantize", programs - 1, programs,
            out, packed, absmax, programs - 1, rest, block=BLOCK, blocks=blocks,
        )  # fmt: skip
        assert torch.equal(out[n - rest :].float(), torch.full((rest,), 3.0))
    assert torch.equal(out[n - rest - 8 : n - rest].float(), torch.full((8,), 7.0))


def last_columns(format: str) -> None:
    """The last program of a product with a packed weight of more than 2³¹ bytes reads the weight's last rows."""
    from core.train.quant.layout import nf4_pairs

    k, columns, groups = 4096, 4, 32
    a_byte, width = (2, 4) if format == "nf4" else (1, 8)
    n = 2**31 // (k // a_byte) + 5
    programs = -(-n // columns)
    first = (programs - 1) * columns
    x, y = torch.ones(1, k), torch.full((1, n), 7.0)
    packed = torch.empty(n * k // a_byte, dtype=torch.uint8 if format == "nf4" else torch.int8)
    packed[first * k // a_byte :] = 0xFF if format == "nf4" else 127  # 1
    absmax = torch.empty(n * k // BLOCK)
    absmax[first * k // BLOCK :] = torch.arange(n - first).repeat_interleave(k // BLOCK) + 1.0
    scales = [absmax] * 4 if format == "nf4" else [absmax]
    pairs = [nf4_pairs(x.device)] if format == "nf4" else []
    constants: dict[str, Any] = {"double": False} if format == "nf4" else {}
    one_program(
        f"core.train.kernels.triton.gemv:_{format}", programs - 1, programs,
        y, x, packed, *pairs, *scales, y, 1, n, k,
        rows=1, columns=columns, groups=groups, parts=BLOCK // (a_byte * width), width=width, block=BLOCK,
        aligned=True, biased=False, **constants,
    )  # fmt: skip
    assert torch.equal(y[0, first:], k * (torch.arange(n - first) + 1.0)), y[0, first:]
    assert torch.equal(y[0, :first], torch.full((first,), 7.0))


@dataclass(frozen=True)
class Computed:
    backends: dict[str, str]
    trained: list[Tensor]
    """Three outputs, and the gradients of x and of each A and B."""
    generated: list[Tensor]
    """The outputs for two rows, without gradients."""
    unpacked: int
    """How often a dense weight was made for these."""


def step_and_rows() -> Computed:
    """Three packed linears with LoRA over one input, one of them with a bias: a step on 10 rows, then 2 rows without
    gradients, from fixed seeds."""
    from core.train.kernels.autograd import Member, lora_linears
    from core.train.kernels.interface import backend_for
    from core.train.kernels.scratch import clear_scratch, scratch_for
    from core.train.quant.int8 import quantize_int8
    from core.train.quant.nf4 import quantize_nf4

    torch.manual_seed(0)
    members = []
    for n, pack, format in ((12, quantize_nf4, "nf4"), (6, quantize_int8, "int8"), (6, quantize_nf4, "nf4")):
        weight: Any = pack(torch.randn(n, 96) * 0.05)
        bias = torch.randn(n) if n == 12 else None
        a, b = torch.randn(4, 96).requires_grad_(), torch.randn(n, 4).requires_grad_()
        members.append(Member(weight.packed, weight.scales, format, 64, bias, a, b, 0.1))  # type: ignore[arg-type]
    x = torch.randn(2, 5, 96, requires_grad=True)
    outputs = lora_linears(x, members)
    leaves = [x, *(leaf for m in members for leaf in (m.a, m.b))]
    gradients = torch.autograd.grad(outputs, leaves, [torch.randn_like(y) for y in outputs])
    clear_scratch()
    before = scratch_for(x.device).misses
    with torch.no_grad():
        generated = lora_linears(x[:, :1], members)
    return Computed(
        {part: backend_for(x.device, part) for part in ("dequantize", "gemv", "loss")},  # type: ignore[arg-type]
        [y.detach() for y in (*outputs, *gradients)],
        generated,
        scratch_for(x.device).misses - before,
    )


def parts_of_a_block(x: Tensor, y: Tensor, weight: Tensor, above: Tensor) -> tuple[str, list[Tensor]]:
    """The backend, and both norms of x [..., n] and the gated activation of x and y, each with its gradients for
    `above`, by whatever kernels are used in this process."""
    from core.train.kernels.fused.operators import rms_norm, serves, silu_gate
    from core.train.kernels.interface import backend_for

    assert serves(x, y, weight)
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    found: list[Tensor] = []
    for out, leaves in (
        (rms_norm(x, weight, 1e-6, from_one=False), [x]),
        (rms_norm(x, weight, 1e-6, from_one=True), [x]),
        (silu_gate(x, y), [x, y]),
    ):
        found += [out.detach(), *torch.autograd.grad(out, leaves, above)]
    return backend_for(x.device, "block"), found


def turned_heads(x: Tensor, cosine: Tensor, sine: Tensor, above: Tensor) -> tuple[str, list[Tensor]]:
    """The backend, and x [lines, heads, tokens, width] turned, with its gradient for `above`."""
    from core.train.kernels.fused.operators import serves, turned
    from core.train.kernels.interface import backend_for

    assert serves(x, cosine, sine)
    x = x.detach().requires_grad_()
    out = turned(x, cosine, sine)
    return backend_for(x.device, "block"), [out.detach(), *torch.autograd.grad(out, x, above)]


def last_rows(width: int) -> None:
    """The last program of a norm, and of its gradient, writes the last rows of more than 2³¹ numbers, and no more."""
    from core.train.kernels.triton import block

    rows = 2**31 // width + 3
    (programs,), shape = block._rows(rows, width)
    constants = {"from_one": False, "each": shape["each"], "columns": shape["columns"]}
    last = rows - (programs - 1) * shape["each"]
    x, out = torch.empty(rows, width, dtype=torch.bfloat16), torch.empty(rows, width, dtype=torch.bfloat16)
    scale, weight = torch.empty(rows), torch.full((width,), 2.0, dtype=torch.bfloat16)
    x[-last:], out[-last - 1 :], scale[-last - 1 :] = -3.0, 7.0, 7.0
    where = "core.train.kernels.triton.block:"
    one_program(f"{where}_norm", programs - 1, programs, out, scale, x, weight, 0.0, rows, width, **constants)
    assert (out[-last:] == -2.0).all() and (out[-last - 1] == 7.0).all()
    assert torch.allclose(scale[-last:], torch.tensor(1 / 3)) and scale[-last - 1] == 7.0
    one_program(f"{where}_norm_grad", programs - 1, programs, out, x, x, weight, scale, rows, width, **constants)
    assert (out[-last:].abs() < 1e-2).all() and (out[-last - 1] == 7.0).all()  # along x nothing is left
