"""Products and attention of 16-bit operands through float32, on processors where that is quicker.

A CPU with AVX512-BF16 and without AMX multiplies bfloat16 no faster than float32, and oneDNN and PyTorch's attention
lose time around it. With AMX only two things are slower in bfloat16: the gradients of attention over short rows, which
PyTorch computes by many small products, and small products themselves (docs/kernels.md has figures). Here torch's own
kernels of bfloat16 and float16 are replaced, for as long as a run lasts, by its kernels of float32 between two
conversions. Operands and results have the dtypes that they had, and are rounded where they were; sums are added up in
float32 by both. What autograd keeps stays in 16 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
SMALL = 64
"""Products with a side below it, as LoRA's, are left alone: converting takes as long as they do."""
FEW = 1 << 18
"""Numbers of an operand up to which SMALL does not count. oneDNN writes code for every new shape of a product, which
takes longer than such a product does, and a batch of rows mostly has a new shape."""
LARGE = 1 << 24
"""Numbers of an operand above which it is not copied whole: its copy in float32 would take more than 64 MiB."""
PART = 1 << 21
"""Numbers of a larger second operand, an output head, that are copied at once: 8 MiB, which a cache holds."""
SHORT = 192 * 64
"""Numbers of a row's queries, in one head, whose gradients a processor with AMX computes through float32, at most."""
TINY = 1 << 15
"""Numbers of either operand and of the result that a processor with AMX multiplies through float32, at most."""
FORWARD = "_scaled_dot_product_flash_attention_for_cpu"


class Route(StrEnum):
    """What is computed through float32; the values are words of the run record."""

    NOTHING = "direct"
    GRADIENTS = "direct, but gradients of attention over short rows through float32"
    SMALL = "direct, but small products and gradients of attention over short rows through float32"
    EVERYTHING = "through float32"


@cache
def quickest() -> Route:
    """The route for this processor. AMD's with AVX512-BF16 have not been measured, and are left alone."""
    if torch.cpu._is_amx_tile_supported():
        return Route.SMALL
    amd = "AuthenticAMD" in _cpu_info()
    slow = torch.cpu._is_avx512_supported() and not (amd and torch.cpu._is_avx512_bf16_supported())
    return Route.EVERYTHING if slow else Route.NOTHING


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


@contextmanager
def through_float32(route: Route) -> Iterator[None]:
    """Within, kernels of this process are the replaced ones, in every thread."""
    if not (kernels := REPLACED[route]):
        yield
        return
    with replaced({name: make(torch_kernel(name, "CPU")) for name, make in kernels.items()}, "CPU"):
        yield


@contextmanager
def replaced(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Within, these are the kernels of torch's operators of these names for tensors of a dispatch key (`CPU`, `CUDA`),
    in every thread."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that a kernel is replaced
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)
        yield
    finally:
        library._destroy()


def torch_kernel(name: str, key: str) -> Callable[..., Any]:
    """What computes an operator now."""
    kernel = torch.library.get_kernel(f"aten::{name}", key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *args, **more: kernel.call_boxed(keys, *args, **more)


Worth = Callable[[Tensor, Tensor], bool]
"""Whether a product of these two is computed through float32."""


def _narrow(one: Tensor, other: Tensor) -> bool:
    return one.dtype in NARROW and one.dtype is other.dtype


def _worth_it(one: Tensor, other: Tensor) -> bool:
    if not _narrow(one, other):
        return False
    few = max(one.numel(), other.numel()) <= FEW
    return few or (one.numel() <= LARGE and min(*one.shape, other.shape[1]) >= SMALL)


def _tiny(one: Tensor, other: Tensor) -> bool:
    return _narrow(one, other) and max(one.numel(), other.numel(), len(one) * other.shape[1]) <= TINY


def _products(kernel: Callable[..., Any], one: Tensor, other: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The product in float32, whole or in the columns that a slice says. `kernel`: torch's own `mm`."""
    inner, columns = other.shape
    if other.numel() <= LARGE:
        yield slice(None), kernel(one.float(), other.float())
    elif columns >= inner:
        wide, step = one.float(), max(SMALL, PART // inner)
        for start in range(0, columns, step):
            at = slice(start, start + step)
            yield at, kernel(wide, other[:, at].float())
    else:
        step = max(SMALL, PART // columns)
        total = kernel(one[:, :step].float(), other[:step].float())
        for start in range(step, inner, step):
            at = slice(start, start + step)
            total.addmm_(one[:, at].float(), other[at].float())
        yield slice(None), total


def _mm(kernel: Callable[..., Any], worth_it: Worth = _worth_it) -> Callable[..., Any]:
    def mm(one: Tensor, other: Tensor) -> Any:
        if not worth_it(one, other):
            return kernel(one, other)
        if other.numel() <= LARGE:
            return kernel(one.float(), other.float()).to(one.dtype)
        out = one.new_empty(len(one), other.shape[1])
        for at, product in _products(kernel, one, other):
            out[:, at] = product
        return out

    return mm


def _mm_out(kernel: Callable[..., Any], worth_it: Worth = _worth_it) -> Callable[..., Any]:
    product_of = torch_kernel("mm", "CPU")

    def mm_out(one: Tensor, other: Tensor, *, out: Tensor) -> Any:
        fits = out.dtype is one.dtype and out.shape == (len(one), other.shape[1])
        if not fits or not worth_it(one, other):
            return kernel(one, other, out=out)
        for at, product in _products(product_of, one, other):
            out[:, at] = product
        return out

    return mm_out


def _addmm(kernel: Callable[..., Any], worth_it: Worth = _worth_it) -> Callable[..., Any]:
    def addmm(bias: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if not worth_it(one, other) or other.numel() > LARGE:
            return kernel(bias, one, other, beta=beta, alpha=alpha)
        return kernel(bias.float(), one.float(), other.float(), beta=beta, alpha=alpha).to(one.dtype)

    return addmm


def _addmm_(kernel: Callable[..., Any], worth_it: Worth = _worth_it) -> Callable[..., Any]:
    product_of = torch_kernel("mm", "CPU")

    def addmm_(into: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if into.dtype is not one.dtype or not worth_it(one, other):
            return kernel(into, one, other, beta=beta, alpha=alpha)
        if other.numel() <= LARGE:
            return into.copy_(kernel(into.float(), one.float(), other.float(), beta=beta, alpha=alpha))
        for at, product in _products(product_of, one, other):
            here = into[:, at]
            product.mul_(alpha)
            here.copy_(product if beta == 0 else product.add_(here, alpha=beta))
        return into

    return addmm_


def _forward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, attn_mask: Any = None, **more: Any) -> Any:
        if query.dtype not in NARROW:
            return kernel(query, key, value, *args, attn_mask=attn_mask, **more)
        out, logsumexp = kernel(query.float(), key.float(), value.float(), *args, attn_mask=_float(attn_mask), **more)
        return out.to(query.dtype), logsumexp

    return attention


def _backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def gradients(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *args: Any, attn_mask: Any = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        if query.dtype not in NARROW:
            return kernel(gradient, query, key, value, out, *args, attn_mask=attn_mask, **more)
        wide = [tensor.float() for tensor in (gradient, query, key, value, out)]
        found = kernel(*wide, *args, attn_mask=_float(attn_mask), **more)
        return tuple(tensor.to(query.dtype) for tensor in found)

    return gradients


def _short_backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    through = _backward(kernel)

    def gradients(gradient: Tensor, query: Tensor, *args: Any, **more: Any) -> Any:
        short = query.size(-2) * query.size(-1) <= SHORT
        return (through if short else kernel)(gradient, query, *args, **more)

    return gradients


def _float(mask: Any) -> Any:
    return mask.float() if isinstance(mask, Tensor) and mask.dtype in NARROW else mask


PRODUCTS: dict[str, Callable[..., Callable[..., Any]]] = {
    "mm": _mm,
    "mm.out": _mm_out,
    "addmm": _addmm,
    "addmm_": _addmm_,
}
SHORT_ATTENTION = {f"{FORWARD}_backward": _short_backward}
REPLACED: dict[Route, Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    Route.NOTHING: {},
    Route.GRADIENTS: SHORT_ATTENTION,
    Route.SMALL: {**{name: partial(make, worth_it=_tiny) for name, make in PRODUCTS.items()}, **SHORT_ATTENTION},
    Route.EVERYTHING: PRODUCTS | {FORWARD: _forward, f"{FORWARD}_backward": _backward},
}
"""Names of torch's operators, and what makes a kernel of them from torch's own."""
