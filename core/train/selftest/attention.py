"""Attention by each of torch's backends: causal, padded, and packed, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from core.hardware.selftest import ATTENTION, Attention
from core.hardware.tables.attention import CUDNN, libraries_for
from core.train.attention.libraries import LibraryMissing
from core.train.attention.segments import TORCH, apart, varlen
from core.train.selftest.measure import (
    DTYPES,
    Measured,
    NotAvailable,
    SelftestCheck,
    difference,
    draw,
    gradients_of,
    rounded,
    rounding,
)
from core.train.selftest.products import device_arch

Kernel = Attention | Literal["cudnn"]
HEADS, SHARED, WIDTH = 4, 2, 64
LENGTHS = (9, 23, 32)
"""Rows of the packed line, and of the padded batch."""
NARROW = ("bf16", "fp16")
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
STEPS = 16.0
"""Softmax of a product, a product, and three of each in the backward."""


def checks(device: torch.device) -> list[SelftestCheck]:
    found = [
        SelftestCheck(f"attention.{backend}.{dtype}", partial(_backend, backend, dtype))
        for backend in ATTENTION
        for dtype in DTYPES
    ]
    found += [SelftestCheck(f"packed.segments.{dtype}", partial(_segments, dtype)) for dtype in DTYPES]
    if device.type == "cuda":
        found += [SelftestCheck(f"varlen.{dtype}", partial(_varlen, TORCH, dtype)) for dtype in NARROW]
        found += library_checks(device_arch(device))
    return found


def library_checks(arch: str) -> list[SelftestCheck]:
    """Attention by libraries beside PyTorch, in the 16 bits that they compute in, where the architecture has a row."""
    found = [
        SelftestCheck(f"library.{row.name}.{dtype}", partial(_varlen, row.name, dtype))
        for row in libraries_for(arch)
        for dtype in NARROW
    ]
    if arch in CUDNN:
        found += [SelftestCheck(f"library.cudnn.{dtype}", partial(_backend, "cudnn", dtype)) for dtype in NARROW]
    return found


def exact_attention(inputs: Sequence[Tensor], allowed: Tensor) -> Tensor:
    """softmax(q·kᵀ/√d)·v where `allowed`, in the inputs' dtype. Inputs: query [rows, heads, tokens, width], keys and
    values with their own heads."""
    query, key, value = inputs
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    found: Tensor = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value
    return found


def _inputs(dtype: str, device: torch.device, rows: int) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor]]:
    """(on the device, exact, the gradient that comes from above in both): all of LENGTHS' sum or its longest."""
    tokens = sum(LENGTHS) if rows == 1 else max(LENGTHS)
    shapes = [(rows, heads, tokens, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    pairs = [rounded(draw(seed, *shape), dtype, device) for seed, shape in enumerate(shapes)]
    above = rounded(draw(9, rows, HEADS, tokens, WIDTH), dtype, device)
    return [a.requires_grad_() for a, _ in pairs], [b.requires_grad_() for _, b in pairs], above


def _compare(
    found: Tensor, wanted: Tensor, leaves: list[Tensor], exact: list[Tensor], above: tuple[Tensor, Tensor]
) -> float:
    gradients = gradients_of(found, leaves, above[0])
    expected = gradients_of(wanted, exact, above[1])
    return difference([(found, wanted), *zip(gradients, expected, strict=True)])


def _measured(worst: float, dtype: str) -> Measured:
    steps = STEPS if dtype != "fp32" else 16 * STEPS
    return Measured(worst, *rounding(dtype, steps, "a softmax between two products, forward and backward"))


def _backend(backend: Kernel, dtype: str, device: torch.device) -> Measured:
    """Causal without a mask, as unpadded rows are computed, and with the mask of a padded batch. A backend that
    takes no masks (flash) is held to the first alone: torch gives masked calls to another one."""
    leaves, exact, above = _inputs(dtype, device, rows=1)
    tokens = leaves[0].shape[2]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    wanted = exact_attention(exact, causal)
    with _only(backend, device):
        found = _attend(backend, leaves, None)
        worst = _compare(found, wanted, leaves, exact, above)
    leaves, exact, above = _inputs(dtype, device, rows=len(LENGTHS))
    tokens = leaves[0].shape[2]
    there = torch.arange(tokens) < torch.tensor(LENGTHS)[:, None]
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() & there[:, None, None, :]
    allowed = allowed | torch.eye(tokens, dtype=torch.bool)  # a row of nothing has no softmax
    wanted = exact_attention(exact, allowed)
    try:
        with _only(backend, device):
            found = _attend(backend, leaves, allowed.to(device))
    except NotAvailable:
        if backend in ("math", "eager"):
            raise
        return _measured(worst, dtype)
    return _measured(max(worst, _compare(found, wanted, leaves, exact, above)), dtype)


def _attend(backend: Kernel, leaves: list[Tensor], allowed: Tensor | None) -> Tensor:
    query, key, value = leaves
    if backend == "eager":  # as transformers' eager_attention_forward
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        tokens = query.shape[2]
        if allowed is None:
            allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
        scores = scores + torch.zeros_like(scores).masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        return torch.matmul(weights, value)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    try:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=None
        )
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            raise NotAvailable(str(error).splitlines()[0]) from error
        raise


@contextmanager
def _only(backend: Kernel, device: torch.device) -> Iterator[None]:
    if backend == "eager":
        yield
        return
    if device.type == "cpu" and backend == "efficient":
        raise NotAvailable("a CPU has no such kernel")
    with sdpa_kernel(KERNELS[backend]):
        yield


def _segments(dtype: str, device: torch.device) -> Measured:
    """Rows end to end, each by itself, by whatever backend torch takes."""
    leaves, exact, above = _inputs(dtype, device, rows=1)
    found = apart(leaves[0], leaves[1], leaves[2], LENGTHS, None)
    wanted = exact_attention(exact, _apart())
    return _measured(_compare(found.transpose(1, 2), wanted, leaves, exact, above), dtype)


def _varlen(by: str, dtype: str, device: torch.device) -> Measured:
    """The same by variable-length flash attention, PyTorch's or a library's, in one call."""
    leaves, exact, above = _inputs(dtype, device, rows=1)
    boundaries = torch.tensor([0, *LENGTHS], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    try:
        lengths = (boundaries, max(LENGTHS))
        found = varlen(leaves[0], leaves[1], leaves[2], lengths, lengths, None, by)
    except LibraryMissing as error:
        raise NotAvailable(str(error)) from error
    except (ImportError, NotImplementedError) as error:
        if by != TORCH:
            raise  # it is installed, and does not work: that is to be told
        raise NotAvailable(str(error).splitlines()[0]) from error
    wanted = exact_attention(exact, _apart())
    return _measured(_compare(found.transpose(1, 2), wanted, leaves, exact, above), dtype)


def _apart() -> Tensor:
    """[tokens, tokens]: whether a token of the packed line may look at another."""
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    return (row[:, None] == row[None, :]).tril()
