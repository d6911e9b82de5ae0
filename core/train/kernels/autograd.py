"""What modules call: linear over a packed weight, alone or with a LoRA, in eager mode and inside `torch.compile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.train.kernels import ops
from core.train.kernels.interface import Format


def linear(
    x: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    format: Format,
    block: int,
    out_features: int,
    bias: Tensor | None,
) -> Tensor:
    """x·Wᵀ + bias; see `core.train.kernels.ops`."""
    if torch.compiler.is_compiling():
        result: Tensor = ops.quant_linear(x, packed, scales, format, block, out_features, bias)
        return result
    y: Tensor = _Linear.apply(x, packed, scales, format, block, out_features, bias)  # type: ignore[no-untyped-call]
    return y


def lora_linear(
    x: Tensor,
    dropped: Tensor | None,
    packed: Tensor,
    scales: Sequence[Tensor],
    format: Format,
    block: int,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
) -> Tensor:
    """x·Wᵀ + bias + scaling · (x·Aᵀ)·Bᵀ; see `core.train.kernels.ops`."""
    if torch.compiler.is_compiling():
        compiled: Tensor = ops.lora_linear(x, dropped, packed, scales, format, block, bias, a, b, scaling)[0]
        return compiled
    y: Tensor = _LoraLinear.apply(x, dropped, packed, scales, format, block, bias, a, b, scaling)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        scales: Sequence[Tensor],
        format: str,
        block: int,
        out_features: int,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(packed, *scales)
        ctx.about = (format, block, x.shape[-1])
        ctx.bias_dtype = None if bias is None else bias.dtype
        return ops._linear(x, packed, scales, format, block, out_features, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, *scales = ctx.saved_tensors
        grad_x = ops._linear_grad(grad, packed, scales, *ctx.about) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[6] else None
        return grad_x, None, None, None, None, None, grad_bias


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        packed: Tensor,
        scales: Sequence[Tensor],
        format: str,
        block: int,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        y, xa = ops._lora_forward(x, dropped, packed, scales, format, block, bias, a, b, scaling)
        ctx.save_for_backward(x if dropped is None else dropped, xa, packed, a, b, *scales)
        ctx.about = (format, block, scaling, dropped is not None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        adapter_x, xa, packed, a, b, *scales = ctx.saved_tensors
        format, block, scaling, separate = ctx.about
        with_x = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_x, grad_dropped, grad_a, grad_b = ops._lora_grad(
            grad, adapter_x, xa, packed, scales, format, block, a, b, scaling, with_x, separate
        )
        grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[6] else None
        return (
            grad_x if ctx.needs_input_grad[0] else None,
            grad_dropped if ctx.needs_input_grad[1] else None,
            None, None, None, None, grad_bias, grad_a, grad_b, None,
        )  # fmt: skip
