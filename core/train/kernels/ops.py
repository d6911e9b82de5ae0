"""Operators over a packed weight: linear, and linear with a LoRA beside it, each with its gradient.

Each exists twice over the same arithmetic: registered with torch.library, for `torch.compile(fullgraph=True)`, and as
an autograd function (core/train/kernels/autograd.py), for eager mode, where the registered form costs 0.4 ms more a
call (forward and backward, 1 Zen 4 core; 200 calls a step). Only packed weights, x and x·Aᵀ are kept for the
backward; a dense weight exists in the scratch buffer for the moment of a product. Second derivatives are not defined.

Shapes: x [..., K], packed weight of [N, K], A [r, K], B [N, r], y [..., N]. `scales` are those of the weight's format
(`NF4Weight.scales`). A and B may be of another dtype (float32) than x: they are rounded to x's for the products, and
their gradients come back in their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from core.train.kernels.format import Format
from core.train.kernels.interface import dequantize_into
from core.train.kernels.scratch import scratch_for


def _dense(
    packed: Tensor, scales: Sequence[Tensor], format: str, block: int, shape: tuple[int, int], like: Tensor
) -> Tensor:
    if format == "dense":
        return packed.to(like.dtype)

    def fill(out: Tensor) -> None:
        dequantize_into(out, packed, list(scales), cast(Format, format), block)

    flat = scratch_for(packed.device).dense(packed, shape[0] * shape[1], like.dtype, fill)
    return flat.view(shape)


# --- dequantise ------------------------------------------------------------------------------------


@torch.library.custom_op("eft::dequantize", mutates_args=())
def dequantize(
    packed: Tensor, scales: Sequence[Tensor], format: str, block: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """A fresh dense tensor of `shape`."""
    out = torch.empty(torch.Size(shape).numel(), dtype=dtype, device=packed.device)
    dequantize_into(out, packed, list(scales), cast(Format, format), block)
    return out.view(list(shape))


@dequantize.register_fake
def _(
    packed: Tensor, scales: Sequence[Tensor], format: str, block: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return packed.new_empty(list(shape), dtype=dtype)


# --- linear ----------------------------------------------------------------------------------------


@torch.library.custom_op("eft::quant_linear", mutates_args=())
def quant_linear(
    x: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str, block: int, out_features: int, bias: Tensor | None
) -> Tensor:
    """x·Wᵀ + bias, in x's dtype. The weight is frozen: only x and the bias get gradients."""
    return _linear(x, packed, scales, format, block, out_features, bias)


def _linear(
    x: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str, block: int, out_features: int, bias: Tensor | None
) -> Tensor:
    weight = _dense(packed, scales, format, block, (out_features, x.shape[-1]), x)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


@quant_linear.register_fake
def _(
    x: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str, block: int, out_features: int, bias: Tensor | None
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.custom_op("eft::quant_linear_grad", mutates_args=())
def quant_linear_grad(
    grad: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str, block: int, in_features: int
) -> Tensor:
    """grad·W"""
    return _linear_grad(grad, packed, scales, format, block, in_features)


def _linear_grad(
    grad: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str, block: int, in_features: int
) -> Tensor:
    return grad @ _dense(packed, scales, format, block, (grad.shape[-1], in_features), grad)


@quant_linear_grad.register_fake
def _(grad: Tensor, packed: Tensor, scales: Sequence[Tensor], format: str, block: int, in_features: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], in_features)


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, packed, scales, format, block, _, bias = inputs
    ctx.save_for_backward(packed, *scales)
    ctx.about = (format, block, x.shape[-1])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    packed, *scales = ctx.saved_tensors
    format, block, in_features = ctx.about
    grad_x = quant_linear_grad(grad, packed, scales, format, block, in_features) if ctx.needs_input_grad[0] else None
    wanted = ctx.bias_dtype is not None and ctx.needs_input_grad[-1]
    grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if wanted else None
    return grad_x, None, [None] * len(scales), None, None, None, grad_bias


quant_linear.register_autograd(_linear_backward, setup_context=_linear_context)


# --- linear with LoRA ------------------------------------------------------------------------------


@torch.library.custom_op("eft::lora_linear", mutates_args=())
def lora_linear(
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
) -> tuple[Tensor, Tensor]:
    """(x·Wᵀ + bias + scaling · (x·Aᵀ)·Bᵀ, x·Aᵀ). `dropped` is x after the adapter's dropout, where it has one; the
    second result is there for the backward."""
    return _lora_forward(x, dropped, packed, scales, format, block, bias, a, b, scaling)


def _lora_forward(
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
) -> tuple[Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    adapter_rows = rows if dropped is None else dropped.reshape(rows.shape)
    xa = adapter_rows @ a.to(x.dtype).t()
    weight = _dense(packed, scales, format, block, (b.shape[0], a.shape[1]), x)
    y = torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(x.dtype))
    y.addmm_(xa, b.to(x.dtype).t(), alpha=scaling)
    return y.view(*x.shape[:-1], b.shape[0]), xa


@lora_linear.register_fake
def _(
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
) -> tuple[Tensor, Tensor]:
    # Not `Size.numel`: inside torch.compile it would make constants of symbols.
    return x.new_empty(*x.shape[:-1], b.shape[0]), x.new_empty(math.prod(x.shape[:-1]), a.shape[0])


@torch.library.custom_op("eft::lora_linear_grad", mutates_args=())
def lora_linear_grad(
    grad: Tensor,
    adapter_x: Tensor,
    xa: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    format: str,
    block: int,
    a: Tensor,
    b: Tensor,
    scaling: float,
    with_x: bool,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, of the dropped x (empty unless `separate`), of A and of B. Without `with_x` the first two are
    empty, and the weight is not dequantised."""
    return _lora_grad(grad, adapter_x, xa, packed, scales, format, block, a, b, scaling, with_x, separate)


def _lora_grad(
    grad: Tensor,
    adapter_x: Tensor,
    xa: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    format: str,
    block: int,
    a: Tensor,
    b: Tensor,
    scaling: float,
    with_x: bool,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = grad.reshape(-1, grad.shape[-1])
    grad_xa = (rows @ b.to(grad.dtype)).mul_(scaling)
    grad_a = (grad_xa.t() @ adapter_x.reshape(-1, a.shape[1])).to(a.dtype)
    grad_b = (rows.t() @ xa).mul_(scaling).to(b.dtype)
    grad_x, grad_dropped = grad.new_empty(0), grad.new_empty(0)
    if with_x:
        shape = (*grad.shape[:-1], a.shape[1])
        flat = rows @ _dense(packed, scales, format, block, (b.shape[0], a.shape[1]), grad)
        if separate:
            grad_dropped = (grad_xa @ a.to(grad.dtype)).view(shape)
        else:
            flat.addmm_(grad_xa, a.to(grad.dtype))
        grad_x = flat.view(shape)
    return grad_x, grad_dropped, grad_a, grad_b


@lora_linear_grad.register_fake
def _(
    grad: Tensor,
    adapter_x: Tensor,
    xa: Tensor,
    packed: Tensor,
    scales: Sequence[Tensor],
    format: str,
    block: int,
    a: Tensor,
    b: Tensor,
    scaling: float,
    with_x: bool,
    separate: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (*grad.shape[:-1], a.shape[1])
    x = grad.new_empty(shape) if with_x else grad.new_empty(0)
    dropped = grad.new_empty(shape) if with_x and separate else grad.new_empty(0)
    return x, dropped, torch.empty_like(a), torch.empty_like(b)


def _lora_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, dropped, packed, scales, format, block, bias, a, b, scaling = inputs
    ctx.save_for_backward(x if dropped is None else dropped, output[1], packed, a, b, *scales)
    ctx.about = (format, block, scaling, dropped is not None)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _lora_backward(ctx: Any, grad: Tensor | None, grad_xa: Tensor | None) -> tuple[Any, ...]:
    adapter_x, xa, packed, a, b, *scales = ctx.saved_tensors
    format, block, scaling, separate = ctx.about
    nothing = [None] * len(scales)
    if grad is None:
        return None, None, None, nothing, None, None, None, None, None, None
    with_x = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
    grad_x, grad_dropped, grad_a, grad_b = lora_linear_grad(
        grad, adapter_x, xa, packed, scales, format, block, a, b, scaling, with_x, separate
    )
    wanted = ctx.bias_dtype is not None and ctx.needs_input_grad[6]
    grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if wanted else None
    return (
        grad_x if ctx.needs_input_grad[0] else None,
        grad_dropped if separate and ctx.needs_input_grad[1] else None,
        None, nothing, None, None, grad_bias, grad_a, grad_b, None,
    )  # fmt: skip


lora_linear.register_autograd(_lora_backward, setup_context=_lora_context)
