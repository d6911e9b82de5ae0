"""Calls of the C kernels by ctypes: tensors become addresses and sizes. `native.py` says what each computes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from core.train.kernels.adamw import AdamNumbers, QuantisedMeans, bounds_of

DTYPES = (torch.bfloat16, torch.float32)
LANES = 16
"""Floats of an AVX-512 register (few_rows.c)."""
NAMES = (
    *("eft_nf4", "eft_int8", "eft_softmax_stats", "eft_softmax_scale", "eft_adamw"),
    *("eft_norm", "eft_norm_grad", "eft_gate", "eft_gate_grad", "eft_turn"),
    *("eft_few_dense", "eft_few_nf4", "eft_few_int8"),
)


@dataclass(frozen=True, slots=True)
class LoRAFactors:
    """An adapter beside a weight [n, k]: its product is scale · (x · aᵀ) · bᵀ."""

    a: Tensor
    """[r, k], float32, contiguous; r is a multiple of LANES."""
    b: Tensor
    """[n, r], float32, contiguous."""
    scale: float
    narrow: bool
    """Each of its three products is rounded to bfloat16, and a and b have been."""


def few_rows(
    kernels: ctypes.CDLL, x: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int, n: int
) -> Tensor:
    from core.train.quant.layout import nf4_map

    rows, width = x.shape
    wide, packed = x.float().contiguous(), packed.contiguous()
    out, scales = torch.empty(rows, n), [tensor.contiguous() for tensor in scales]
    sizes = [ctypes.c_int64(size) for size in (rows, n, width, block)]
    ends = is_narrow(x), torch.get_num_threads()
    if format == "int8":
        kernels.eft_few_int8(at(out), at(wide), at(packed), *sizes, at(scales[0]), *ends)
        return out
    double = scales if len(scales) == 4 else [None] * 4
    aside = torch.empty_like(wide)
    kernels.eft_few_nf4(
        at(out), at(wide), at(aside), at(packed), *sizes, at(nf4_map(out.device)),
        *map(at, double), at(scales[0] if len(scales) == 1 else None), *ends,
    )  # fmt: skip
    return out


def wide_product(
    kernels: ctypes.CDLL,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    adapter: LoRAFactors | None,
    narrow: bool,
) -> None:
    wide, added = x.float().contiguous(), None if bias is None else bias.float().contiguous()
    a, b, low, rank = None, None, None, 0
    if adapter is not None:
        a, b, rank = adapter.a, adapter.b, len(adapter.a)
        low = torch.empty(len(x), rank)
    scale = ctypes.c_float(1.0 if adapter is None else adapter.scale)
    sizes = [ctypes.c_int64(size) for size in (*out.shape, weight.shape[1], rank)]
    rounding = is_narrow(weight), int(narrow), int(adapter is not None and adapter.narrow)
    tensors = map(at, (out, wide, weight, added, a, b, low))
    kernels.eft_few_dense(*tensors, scale, *sizes, *rounding, torch.get_num_threads())


def softmax_stats(kernels: ctypes.CDLL, top: Tensor, total: Tensor, logits: Tensor) -> None:
    kernels.eft_softmax_stats(at(top), at(total), at(logits), *size(logits), torch.get_num_threads())


def softmax_scale_(kernels: ctypes.CDLL, logits: Tensor, top: Tensor, factor: Tensor) -> None:
    kernels.eft_softmax_scale(at(logits), at(top), at(factor), *size(logits), torch.get_num_threads())


def norm(
    kernels: ctypes.CDLL, out: Tensor, scale: Tensor, x: Tensor, weight: Tensor, eps: float, from_one: bool
) -> None:
    kernels.eft_norm(
        at(out), at(scale), at(x), at(weight), ctypes.c_float(eps), is_narrow(x), int(from_one),
        *size(x.view(-1, x.shape[-1])), torch.get_num_threads(),
    )  # fmt: skip


def norm_grad(
    kernels: ctypes.CDLL, grad_x: Tensor, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, from_one: bool
) -> None:
    kernels.eft_norm_grad(
        at(grad_x), at(grad), at(x), at(weight), at(scale), is_narrow(x), int(from_one),
        *size(x.view(-1, x.shape[-1])), torch.get_num_threads(),
    )  # fmt: skip


def gate(kernels: ctypes.CDLL, out: Tensor, gate: Tensor, up: Tensor) -> None:
    count = ctypes.c_int64(out.numel())
    kernels.eft_gate(at(out), at(gate), at(up), is_narrow(out), count, torch.get_num_threads())


def gate_grad(kernels: ctypes.CDLL, grad_gate: Tensor, grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor) -> None:
    kernels.eft_gate_grad(
        at(grad_gate), at(grad_up), at(grad), at(gate), at(up), is_narrow(gate), ctypes.c_int64(gate.numel()),
        torch.get_num_threads(),
    )  # fmt: skip


def turn(kernels: ctypes.CDLL, out: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> None:
    lines, tokens, heads, width = x.shape
    kernels.eft_turn(
        at(out), at(x), at(cosine), at(sine), int(back), is_narrow(x),
        *map(ctypes.c_int64, (lines, len(cosine), tokens, heads, width)), torch.get_num_threads(),
    )  # fmt: skip


def adamw(
    kernels: ctypes.CDLL, parameter: Tensor, gradient: Tensor, means: QuantisedMeans, numbers: AdamNumbers
) -> None:
    n = numbers
    factors = (n.keep, n.first, 1.0 - n.first, n.second, 1.0 - n.second, n.root, n.eps, n.rate)
    bounds = [bounds_of(table) for table in means.maps]
    kernels.eft_adamw(
        at(parameter), at(gradient), at(means.mean), at(means.mean_scale), at(means.root),
        at(means.root_scale), at(means.maps[0]), at(means.maps[1]), at(bounds[0]), at(bounds[1]),
        ctypes.c_int64(parameter.numel()), ctypes.c_int64(means.block), means.bits, (ctypes.c_float * 8)(*factors),
        torch.get_num_threads(),
    )  # fmt: skip


def nf4(kernels: ctypes.CDLL, out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    from core.train.quant.layout import nf4_map

    scales = [tensor.contiguous() for tensor in scales]
    absmax8, nested, table, offset = scales if len(scales) == 4 else [None] * 4
    kernels.eft_nf4(
        at(out), int(out.dtype == torch.bfloat16), at(packed.contiguous()), ctypes.c_int64(out.numel()),
        ctypes.c_int64(block), at(nf4_map(out.device)), at(absmax8), at(nested), at(table), at(offset),
        at(scales[0] if len(scales) == 1 else None), torch.get_num_threads(),
    )  # fmt: skip


def int8(kernels: ctypes.CDLL, out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    absmax = scales[0].contiguous()
    kernels.eft_int8(
        at(out), int(out.dtype == torch.bfloat16), at(packed.contiguous()), ctypes.c_int64(out.numel()),
        ctypes.c_int64(block), at(absmax), torch.get_num_threads(),
    )  # fmt: skip


def at(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def is_narrow(tensor: Tensor) -> int:
    return int(tensor.dtype == torch.bfloat16)


def size(tensor: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    rows, width = tensor.shape
    return ctypes.c_int64(rows), ctypes.c_int64(width)
