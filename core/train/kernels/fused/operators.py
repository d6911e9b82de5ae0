"""RMS norm, the gated activation and rotary embedding, each one operator with its gradient: in C on a CPU, in Triton
on a GPU.

Values are rounded where the eager formulas round them, so that in bfloat16 a result differs from the eager one where a
sum in another order, or another exponential, falls on the other side of a rounding. Each row is computed by itself, in
an order that neither threads nor other rows change. `serves` says which tensors they take.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.train.kernels import native
from core.train.kernels.c_code.calls import DTYPES
from core.train.kernels.interface import backend_for


def serves(*tensors: Tensor) -> bool:
    """Whether the operators take these tensors: of one dtype that the device's kernels compute in."""
    first = tensors[0]
    if any(each.dtype != first.dtype for each in tensors):
        return False
    match backend_for(first.device, "block"):
        case "native":
            return first.dtype in DTYPES
        case "triton":
            block = _kernels(first)
            return first.dtype in block.DTYPES and first.shape[-1] <= block.WIDEST
        case "portable":
            return False


def _kernels(tensor: Tensor) -> Any:
    """The module of kernels for the tensor's device; both have the same functions."""
    if backend_for(tensor.device, "block") != "triton":
        return native
    from core.train.kernels.triton import block

    return block


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, from_one: bool) -> Tensor:
    """x [..., n] over the root of its mean square, times the frozen weight [n]; with `from_one` times 1 + weight, as
    Gemma has it, with one rounding in place of two. No second derivatives."""
    return cast(Tensor, _Norm.apply(x, weight, eps, from_one))  # type: ignore[no-untyped-call]


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of one shape. No second derivatives."""
    return cast(Tensor, _Gate.apply(gate, up))  # type: ignore[no-untyped-call]


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of x [lines, heads, tokens, width], an even width: x · cos + (-x₂, x₁) · sin with x₁ and x₂ the
    halves of x, by cosines and sines [one or `lines`, tokens, width]. The bits of the eager formula, also of the
    gradient. No second derivatives."""
    return cast(Tensor, _Turned.apply(x, cosine, sine))  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, from_one: bool) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, scale = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        _kernels(x).norm(out, scale, x, weight, eps, from_one)
        ctx.save_for_backward(x, weight, scale)
        ctx.from_one = from_one
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        _kernels(x).norm_grad(grad_x, grad.contiguous(), x, weight, scale, ctx.from_one)
        return grad_x, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _kernels(out).gate(out, gate, up)
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        _kernels(gate).gate_grad(grad_gate, grad_up, grad.contiguous(), gate, up)
        return grad_gate, grad_up


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        cosine, sine = cosine.contiguous(), sine.contiguous()
        ctx.save_for_backward(cosine, sine)
        return _turn(x, cosine, sine, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _turn(grad, *ctx.saved_tensors, back=True), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor, *, back: bool) -> Tensor:
    by_token = x.transpose(1, 2).contiguous()  # as projections leave it: nothing is copied
    out = torch.empty_like(by_token)
    _kernels(x).turn(out, by_token, cosine, sine, back)
    return out.transpose(1, 2)
