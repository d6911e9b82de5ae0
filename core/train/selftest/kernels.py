"""Our own kernels, each backend by its name: dequantisation, products over packed weights, the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.hardware.selftest import WIDE_RANK
from core.train.kernels import interface
from core.train.kernels.autograd import Member, lora_linear
from core.train.kernels.format import Format
from core.train.kernels.fused.operators import rms_norm, silu_gate, turned
from core.train.kernels.interface import Backend
from core.train.loss.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy
from core.train.quant.int8 import dequantize_int8_into, quantize_int8
from core.train.quant.nf4 import dequantize_nf4_into, quantize_nf4
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

FORMATS: tuple[Format, ...] = ("nf4", "int8")
BLOCK = 64
SHAPE = (130, 192)
"""Shape of a packed weight: no multiple of what a block of GPU threads takes."""


def checks(device: torch.device) -> list[SelftestCheck]:
    found = [
        SelftestCheck(f"dequantize.{backend}.{format}", partial(_dequantize, backend, format))
        for backend in interface.available(device)
        for format in FORMATS
    ]
    found += [
        SelftestCheck(f"qlora.{format}.{dtype}", partial(_qlora, format, dtype))
        for format in FORMATS
        for dtype in DTYPES
    ]
    found += [
        SelftestCheck(f"gemv.{backend}.{format}", partial(_few_rows, backend, format))
        for backend in interface.available(device, "gemv")
        if backend != "portable"
        for format in FORMATS
    ]
    found += [SelftestCheck(f"loss.logits.{dtype}", partial(_whole_logits, dtype)) for dtype in DTYPES]
    found += [
        SelftestCheck(f"loss.{backend}.{dtype}", partial(_chunked, backend, dtype))
        for backend in interface.available(device, "loss")
        for dtype in DTYPES
    ]
    found += [
        SelftestCheck(f"block.{backend}.{dtype}", partial(_parts_of_a_block, dtype))
        for backend in interface.available(device, "block")
        if backend != "portable"
        for dtype in (DTYPES if backend == "triton" else ("bf16", "fp32"))
    ]
    return found


def _weight(format: Format) -> Any:
    values = draw(1, *SHAPE, scale=0.05).float()
    values[0, :64] = 0.0  # a block of nothing
    values[3, 5] = 9.0  # and one with an outlier
    return quantize_nf4(values) if format == "nf4" else quantize_int8(values)


def _dense(format: Format, weight: Any, dtype: torch.dtype) -> Tensor:
    """By torch on the CPU: one multiplication in float32, rounded once."""
    out = torch.empty(SHAPE[0] * SHAPE[1], dtype=dtype)
    fill = dequantize_nf4_into if format == "nf4" else dequantize_int8_into
    fill(out, weight.packed, weight.scales, BLOCK)
    return out.view(SHAPE)


def _dequantize(backend: Backend, format: Format, device: torch.device) -> Measured:
    weight = _weight(format)
    packed, scales = weight.packed.to(device), [scale.to(device) for scale in weight.scales]
    worst = 0.0
    for dtype in DTYPES.values():
        if backend == "native" and dtype is torch.float16:
            continue  # it leaves that to the portable backend
        out = torch.full((SHAPE[0] * SHAPE[1],), float("nan"), dtype=dtype, device=device)
        interface.dequantize_with(backend, out, packed, scales, format, BLOCK)
        worst = max(worst, difference([(out.view(SHAPE), _dense(format, weight, dtype))]))
    return Measured(worst, 0.0, "one multiplication in float32 and one rounding are the same everywhere")


def _qlora(format: Format, dtype: str, device: torch.device) -> Measured:
    """Base and LoRA in one operator over what the portable backend unpacks, forward and backward."""
    weight = _weight(format)
    outer, inner = SHAPE
    x, exact_x = rounded(draw(2, 40, inner), dtype, device)
    a, exact_a = rounded(draw(3, WIDE_RANK, inner, scale=inner**-0.5), dtype, device)
    b, exact_b = rounded(draw(4, outer, WIDE_RANK, scale=0.25), dtype, device)
    up, exact_up = rounded(draw(5, 40, outer), dtype, device)
    leaves = [t.requires_grad_() for t in (x, a.float(), b.float())]
    exact = [t.requires_grad_() for t in (exact_x, exact_a, exact_b)]
    scales = [scale.to(device) for scale in weight.scales]
    member = Member(weight.packed.to(device), scales, format, BLOCK, None, leaves[1], leaves[2], 2.0)
    with _portable(device):
        y = lora_linear(x, member)
        gradients = gradients_of(y, leaves, up)
    base = _dense(format, weight, DTYPES[dtype]).double()
    wanted = exact_x @ base.t() + 2.0 * (exact_x @ exact_a.t()) @ exact_b.t()
    expected = gradients_of(wanted, exact, exact_up)
    steps = 8.0 if dtype != "fp32" else 256.0
    return Measured(
        difference([(y, wanted), *zip(gradients, expected, strict=True)]),
        *rounding(dtype, steps, "four products in a row and their sum"),
    )


@contextmanager
def _portable(device: torch.device) -> Iterator[None]:
    for backend in interface.available(device):
        if backend != "portable":
            interface.veto(backend, "the self-test tries what is left without it", "dequantize")
    try:
        yield
    finally:
        interface.unveto()


def _few_rows(backend: Backend, format: Format, device: torch.device) -> Measured:
    weight = _weight(format)
    x, exact_x = rounded(draw(2, 3, SHAPE[1]), "bf16", device)
    scales = [scale.to(device) for scale in weight.scales]
    y = interface.few_rows_with(backend, x, weight.packed.to(device), scales, format, BLOCK, SHAPE[0], None)
    if y is None:
        raise NotAvailable("it does not take such rows")
    wanted = exact_x @ _dense(format, weight, torch.float32).double().t()
    return Measured(difference([(y, wanted)]), *rounding("bf16", 4.0, "the weight, the product"))


def _rows(dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """hidden [70, 48] and head [1003, 48], on the device and exact, and labels with some of them ignored."""
    hidden, exact_hidden = rounded(draw(1, 70, 48), dtype, device)
    head, exact_head = rounded(draw(2, 1003, 48, scale=0.3), dtype, device)
    labels = torch.randint(0, 1003, (70,), generator=torch.Generator().manual_seed(3))
    labels[::9] = IGNORE_INDEX
    return hidden.requires_grad_(), exact_hidden.requires_grad_(), head, exact_head, labels


def _loss(dtype: str, device: torch.device, compute: Any) -> Measured:
    hidden, exact, head, exact_head, labels = _rows(dtype, device)
    found = compute(hidden, head, labels.to(device))
    wanted = functional.cross_entropy(exact @ exact_head.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    gradient, expected = torch.autograd.grad(found, hidden)[0], torch.autograd.grad(wanted, exact)[0]
    steps = 8.0 if dtype != "fp32" else 256.0
    why = "logits, their softmax, and its product with the head"
    return Measured(difference([(found, wanted), (gradient, expected)]), *rounding(dtype, steps, why))


def _whole_logits(dtype: str, device: torch.device) -> Measured:
    def compute(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, head).float()
        return functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    return _loss(dtype, device, compute)


def _chunked(backend: Backend, dtype: str, device: torch.device) -> Measured:
    if backend == "native" and dtype != "bf16":
        raise NotAvailable("it computes bf16 alone, and leaves the rest to the portable backend")

    def compute(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, head, labels, chunk_rows=32, backend=backend)

    return _loss(dtype, device, compute)


def _parts_of_a_block(dtype: str, device: torch.device) -> Measured:
    """Both RMS norms, the gated activation and rotary embedding, forward and backward."""
    x, exact_x = rounded(draw(1, 40, 200), dtype, device)
    y, exact_y = rounded(draw(2, 40, 200), dtype, device)
    weight, exact_weight = rounded(draw(3, 200, scale=0.3), dtype, device)
    leaves, exact = [t.requires_grad_() for t in (x, y)], [t.requires_grad_() for t in (exact_x, exact_y)]
    normed = exact_x * torch.rsqrt(exact_x.pow(2).mean(-1, keepdim=True) + 1e-6)
    pairs = [
        (rms_norm(x, weight, 1e-6, from_one=False) * y, normed * exact_weight * exact_y),
        (rms_norm(x, weight, 1e-6, from_one=True) * y, normed * (1.0 + exact_weight) * exact_y),
        (silu_gate(x, y), functional.silu(exact_x) * exact_y),
        (_turned(x) * y, _turned_exactly(exact_x) * exact_y),
    ]
    for found, wanted in list(pairs):
        ours = torch.autograd.grad(found.sum(), leaves)
        right = torch.autograd.grad(wanted.sum(), exact, retain_graph=True)
        pairs += zip(ours, right, strict=True)
    steps = 8.0 if dtype != "fp32" else 64.0
    return Measured(difference(pairs), *rounding(dtype, steps, "a sum over a row, an exponential, and products"))


def _angles() -> tuple[Tensor, Tensor]:
    """Cosines and sines of 8 tokens, for heads of 40."""
    angles = torch.arange(8.0).view(1, 8, 1) * torch.exp2(-torch.arange(20.0) / 2).repeat(2)
    return angles.cos(), angles.sin()


def _turned(x: Tensor) -> Tensor:
    """x [40, 200] as a line of 5 heads in each of 5 · 8 tokens."""
    cosine, sine = (each.to(x.device, x.dtype) for each in _angles())
    return turned(x.view(5, 8, 5, 40).transpose(1, 2), cosine, sine).transpose(1, 2).reshape(40, 200)


def _turned_exactly(x: Tensor) -> Tensor:
    heads, (cosine, sine) = x.view(5, 8, 5, 40), (each.to(x.dtype).unsqueeze(2) for each in _angles())
    low, high = heads.chunk(2, -1)
    return (heads * cosine + torch.cat([-high, low], -1) * sine).reshape(40, 200)
