"""What a backend has to do, and which one does it. All others above it (operators, modules) know no device.

A backend fills a dense buffer from a packed weight; the matrix products around it are the platform's BLAS. For training
a product fused with the dequantisation does not pay: it is for generation with a few rows (`few_rows`).

A device has backends that can run on it (`available`, best first). A self-test takes those away that computed wrongly
there (`veto`); what is left first is used (`backend_for`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, assert_never, get_args

import torch
from torch import Tensor

from core.train.kernels import native, portable
from core.train.kernels.c_code.calls import LANES
from core.train.kernels.format import FEW_ROWS, Format
from core.train.kernels.triton import probe

log = logging.getLogger("eft.train.kernels")

Backend = Literal["portable", "native", "triton"]
Part = Literal["dequantize", "gemv", "loss", "block"]
"""What is chosen by itself: unpacking, the product of few rows, the loss over a chunk of logits, and what a block
computes beside its products (core/train/kernels/fused)."""

_vetoes: dict[tuple[Backend, Part], str] = {}


# --- which backend ---------------------------------------------------------------------------------


@cache
def backend_for(device: torch.device, part: Part = "dequantize") -> Backend:
    """The backend in use on a device."""
    return next(backend for backend in available(device, part) if (backend, part) not in _vetoes)


def available(device: torch.device, part: Part = "dequantize") -> tuple[Backend, ...]:
    """What can run there, best first, whatever has been vetoed; the last is always `portable`. `EFT_KERNELS=portable`
    leaves that alone. (`EFT_KERNELS=triton` on a CPU is for tests: Triton's interpreter.)"""
    asked = os.environ.get("EFT_KERNELS")
    if asked == "triton" or (asked != "portable" and device.type == "cuda"):
        if probe.unavailable(device) is None:
            return "triton", "portable"
    elif device.type == "cpu" and not isinstance(native.library(), str):  # it heeds EFT_KERNELS
        return ("native", "portable") if part != "gemv" or native.multiplies_few_rows(64) else ("portable",)
    return ("portable",)


def veto(backend: Backend, why: str, part: Part | None = None) -> None:
    """Do not use a backend in this process, for one part or for all. ValueError for `portable`: something has to
    compute."""
    if backend == "portable":
        raise ValueError(f"the portable backend is what is left when others fail; it cannot be vetoed ({why})")
    log.warning("the %s kernels are not used for %s: %s", backend, part or "anything", why)
    for each in get_args(Part) if part is None else (part,):
        _vetoes[backend, each] = why
    backend_for.cache_clear()


def vetoed() -> dict[str, str]:
    """Backend, or `backend:part`, to the reason."""
    parts: tuple[Part, ...] = get_args(Part)
    found: dict[str, str] = {}
    for (backend, part), why in _vetoes.items():
        whole = all(_vetoes.get((backend, each)) == why for each in parts)
        found[backend if whole else f"{backend}:{part}"] = why
    return found


def unveto() -> None:
    """Take all vetoes back."""
    _vetoes.clear()
    backend_for.cache_clear()


def describe(device: torch.device) -> dict[str, Any]:
    """For the run record: the backend, why it is not a faster one, and which parts another one does."""
    found: dict[str, Any] = {"backend": backend_for(device)}
    others = {part: backend_for(device, part) for part in get_args(Part) if part != "block"}  # FusedParts has that
    if "triton" in others.values():
        found["triton"] = probe.version()
        if len(set(others.values())) > 1:
            found["parts"] = others
    if found["backend"] == "portable" and (reason := _why_portable(device)) is not None:
        found["reason"] = reason
    if _vetoes:
        found["vetoed"] = vetoed()
    return found


def _why_portable(device: torch.device) -> str | None:
    if device.type == "cpu":
        reason = native.library()
        return reason if isinstance(reason, str) else None
    if os.environ.get("EFT_KERNELS") == "portable":
        return "EFT_KERNELS=portable asks for it"
    return probe.unavailable(device) if device.type == "cuda" else None


# --- what backends do ------------------------------------------------------------------------------


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], format: Format, block: int) -> None:
    """Fill the flat `out` [n] of float32, bfloat16 or float16 from a weight of n elements; one rounding."""
    backend = backend_for(out.device)
    if backend == "native" and not native.serves(out.dtype):
        backend = "portable"  # float16 on a CPU
    if backend == "triton" and not _power_of_two(block):
        backend = "portable"
    dequantize_with(backend, out, packed, scales, format, block)


def dequantize_with(
    backend: Backend, out: Tensor, packed: Tensor, scales: list[Tensor], format: Format, block: int
) -> None:
    """`dequantize_into` by a backend that the caller names."""
    match backend:
        case "portable":
            portable.dequantize_into(out, packed, scales, format, block)
        case "native":
            native.dequantize_into(out, packed, scales, format, block)
        case "triton":
            from core.train.kernels.triton import int8, nf4

            match format:
                case "nf4":
                    nf4.dequantize_into(out, packed, scales, block)
                case "int8":
                    int8.dequantize_into(out, packed, scales, block)
                case _:
                    assert_never(format)
        case _:
            assert_never(backend)


def few_rows(
    x: Tensor, packed: Tensor, scales: list[Tensor], format: Format, block: int, n: int, bias: Tensor | None
) -> Tensor | None:
    """x [..., k] times a packed weight [n, k], plus bias, where a backend does that without a dense weight: at most
    FEW_ROWS rows, or what `rows_alike` says. None elsewhere. No gradients."""
    if not _power_of_two(block):
        return None
    rows, alike = x.shape[:-1].numel(), _alike.get()
    if rows > FEW_ROWS if alike is None else not alike:
        return None
    backend = backend_for(x.device, "gemv")
    if rows <= FEW_ROWS:
        return few_rows_with(backend, x, packed, scales, format, block, n, bias)
    flat = x.reshape(rows, x.shape[-1])
    found = x.new_empty(rows, n)
    for at in range(0, rows, FEW_ROWS):
        part = few_rows_with(backend, flat[at : at + FEW_ROWS], packed, scales, format, block, n, bias)
        if part is None:
            return None
        found[at : at + FEW_ROWS] = part
    return found.view(*x.shape[:-1], n)


_alike: ContextVar[bool | None] = ContextVar("rows alike", default=None)


@contextmanager
def rows_alike(few: bool) -> Iterator[None]:
    """Within, packed weights are multiplied in one way however many rows there are, so that a row's bits do not depend
    on their number: by `few_rows`, a few at a time, or never by it."""
    token = _alike.set(few)
    try:
        yield
    finally:
        _alike.reset(token)


def few_rows_with(
    backend: Backend,
    x: Tensor,
    packed: Tensor,
    scales: list[Tensor],
    format: Format,
    block: int,
    n: int,
    bias: Tensor | None,
) -> Tensor | None:
    """`few_rows` by a backend that the caller names; None when it does not do such rows."""
    match backend:
        case "portable":
            return None
        case "native":
            if not native.serves(x.dtype) or not native.multiplies_few_rows(x.shape[-1], max(block, 2 * LANES)):
                return None
            y = native.few_rows(x.reshape(-1, x.shape[-1]), packed, scales, format, block, n)
            if bias is not None:
                y += bias.float()
            return y.to(x.dtype).view(*x.shape[:-1], n)
        case "triton":
            from core.train.kernels.triton import gemv

            rows = x.reshape(-1, x.shape[-1])
            if not gemv.serves(rows, format):
                return None
            return gemv.multiply(rows, packed, scales, format, block, n, bias).view(*x.shape[:-1], n)
        case _:
            assert_never(backend)


def _power_of_two(block: int) -> bool:
    return block > 1 and block & (block - 1) == 0
