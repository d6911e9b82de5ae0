"""What modules call: linear over a packed weight, alone or with a LoRA, in eager mode and inside `torch.compile`.

A linear with LoRA is two functions in eager mode. The first makes x·Aᵀ and keeps all that the backward needs; the
second makes the wide product, keeps nothing, and in its backward reads what the first has kept. Gradient checkpointing
(non-reentrant) stops its recomputation at the last tensor that a layer keeps: so it never repeats the product of a
layer's last linear, a quarter of a Llama layer's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.train.kernels import ops
from core.train.kernels.format import Format
from core.train.kernels.interface import few_rows
from core.train.kernels.saved import save_result


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A packed linear with its LoRA, one of those that share an input; or a dense one, whose weight is `packed`."""

    packed: Tensor
    scales: Sequence[Tensor]
    format: Format | Literal["dense"]
    block: int
    bias: Tensor | None
    a: Tensor
    """[r, K]"""
    b: Tensor
    """[N, r]"""
    scaling: float
    dropped: Tensor | None = None
    """The input after this adapter's dropout, where it has one."""


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
    if not torch.is_grad_enabled():
        few = few_rows(x, packed, list(scales), format, block, out_features, bias)
        if few is not None:
            return few
    y: Tensor = _Linear.apply(x, packed, scales, format, block, out_features, bias)  # type: ignore[no-untyped-call]
    return y


def lora_linear(x: Tensor, member: Member) -> Tensor:
    """x·Wᵀ + bias + scaling · (x·Aᵀ)·Bᵀ; see `core.train.kernels.ops`."""
    if torch.compiler.is_compiling():
        m = member
        compiled: Tensor = ops.lora_linear(
            x, m.dropped, m.packed, m.scales, m.format, m.block, m.bias, m.a, m.b, m.scaling
        )[0]
        return compiled
    return lora_linears(x, [member])[0]


def lora_linears(x: Tensor, members: Sequence[Member]) -> list[Tensor]:
    """`lora_linear` for each of several members over one input, in eager mode: one product for all A, one buffer for
    the input's gradient. One member gives what it gives alone to the bit; in a group, x·Aᵀ and the sum of the gradients
    of x are rounded otherwise (once in place of once a member)."""
    leaves = [t for m in members for t in (m.a, m.b, m.bias, m.dropped)]
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, *leaves)):
        return _products(x, members, _narrow(x, members), training=False)
    xa = _Keep.apply(members, x, *leaves)  # type: ignore[no-untyped-call]
    outputs: tuple[Tensor, ...] = _Products.apply(members, xa, x, *leaves)  # type: ignore[no-untyped-call]
    return list(outputs)


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
        ctx.about = (packed, scales, format, block, x.shape[-1])  # buffers of the module: nothing to keep
        ctx.bias_dtype = None if bias is None else bias.dtype
        return save_result(lambda: ops._linear(x, packed, scales, format, block, out_features, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x = ops._linear_grad(grad, *ctx.about) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[6] else None
        return grad_x, None, None, None, None, None, grad_bias


# --- LoRA ------------------------------------------------------------------------------------------


def _narrow(x: Tensor, members: Sequence[Member]) -> Tensor:
    """x·Aᵀ of all members side by side, [rows, Σ r] in x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if all(m.dropped is None for m in members):
        return rows @ _stacked(members, x.dtype).t()
    parts = []
    for m in members:
        source = rows if m.dropped is None else m.dropped.reshape(rows.shape)
        parts.append(source @ m.a.to(x.dtype).t())
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _stacked(members: Sequence[Member], dtype: torch.dtype) -> Tensor:
    if len(members) == 1:
        return members[0].a.detach().to(dtype)
    return torch.cat([m.a.detach().to(dtype) for m in members])


def _products(x: Tensor, members: Sequence[Member], xa: Tensor, training: bool = True) -> list[Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    outputs = []
    for m, part in zip(members, torch.split(xa, [m.a.shape[0] for m in members], dim=1), strict=True):
        y = save_result(partial(_product, rows, m, part)) if training else _product_of_few(rows, m, part)
        outputs.append(y.view(*x.shape[:-1], m.b.shape[0]))
    return outputs


def _product(rows: Tensor, m: Member, xa: Tensor) -> Tensor:
    weight = ops._dense(m.packed, m.scales, m.format, m.block, (m.b.shape[0], m.a.shape[1]), rows)
    y = torch.nn.functional.linear(rows, weight, None if m.bias is None else m.bias.to(rows.dtype))
    return y.addmm_(xa, m.b.to(rows.dtype).t(), alpha=m.scaling)


def _product_of_few(rows: Tensor, m: Member, xa: Tensor) -> Tensor:
    if m.format == "dense":
        return _product(rows, m, xa)
    y = few_rows(rows, m.packed, list(m.scales), m.format, m.block, m.b.shape[0], m.bias)
    if y is None:
        return _product(rows, m, xa)
    return y.addmm_(xa, m.b.to(rows.dtype).t(), alpha=m.scaling)


class _Keep(torch.autograd.Function):
    """x·Aᵀ of all members; keeps x (or what dropout made of it), the product, A and B. Its own backward has nothing
    to do: `_Products` answers for the inputs of both."""

    @staticmethod
    def forward(ctx: Any, members: Sequence[Member], x: Tensor, *leaves: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        xa = _narrow(x, members)
        shared = x if any(m.dropped is None for m in members) else None
        ctx.save_for_backward(
            xa, shared, *(m.dropped for m in members), *(m.a for m in members), *(m.b for m in members)
        )
        return xa

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, members: Sequence[Member], xa: Tensor, x: Tensor, *leaves: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kept = xa.grad_fn  # the node of _Keep, which has every input of this one among its own
        ctx.x_shape = x.shape
        ctx.about = [(m.packed, m.scales, m.format, m.block, m.scaling) for m in members]
        return tuple(_products(x, members, xa))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.about)
        xa, x, *kept = ctx.kept.saved_tensors
        dropped, a, b = kept[:count], kept[count : 2 * count], kept[2 * count :]
        with_x, *wanted = ctx.needs_input_grad[2:]
        flat: Tensor | None = None  # gradient of x [rows, K]
        narrow: list[Tensor | None] = []  # of each member's part of x·Aᵀ
        leaves: list[Tensor | None] = [None] * (4 * count)  # of each member's A, B, bias and dropped input
        parts = torch.split(xa, [each.shape[0] for each in a], dim=1)
        for i, (grad, part, (packed, scales, format, block, scaling)) in enumerate(
            zip(grads, parts, ctx.about, strict=True)
        ):
            if grad is None:
                narrow.append(None)
                continue
            rows = grad.reshape(-1, grad.shape[-1])
            narrow.append((rows @ b[i].to(grad.dtype)).mul_(scaling))
            leaves[4 * i + 1] = (rows.t() @ part).mul_(scaling).to(b[i].dtype)
            if wanted[4 * i + 2]:
                leaves[4 * i + 2] = rows.sum(0)
            if with_x:
                weight = ops._dense(packed, scales, format, block, (b[i].shape[0], a[i].shape[1]), grad)
                flat = rows @ weight if flat is None else flat.addmm_(rows, weight)
        together = [i for i in range(count) if narrow[i] is not None and dropped[i] is None]
        if together:
            side = _beside([narrow[i] for i in together])
            grad_a = torch.split(side.t() @ x.reshape(-1, x.shape[-1]), [a[i].shape[0] for i in together])
            for i, each in zip(together, grad_a, strict=True):
                leaves[4 * i] = each.to(a[i].dtype)
            if flat is not None:
                flat.addmm_(side, torch.cat([a[i].to(side.dtype) for i in together]))
        for i, (side_i, own) in enumerate(zip(narrow, dropped, strict=True)):
            if side_i is None or own is None:
                continue
            leaves[4 * i] = (side_i.t() @ own.reshape(-1, own.shape[-1])).to(a[i].dtype)
            if wanted[4 * i + 3]:
                leaves[4 * i + 3] = (side_i @ a[i].to(side_i.dtype)).view(own.shape)
        return None, None, None if flat is None else flat.view(ctx.x_shape), *leaves


def _beside(parts: Sequence[Tensor | None]) -> Tensor:
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)
