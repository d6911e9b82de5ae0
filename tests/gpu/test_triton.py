"""The Triton kernels on a GPU, at the sizes of real models: held to the portable backend and to float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.train.kernels import interface
from core.train.kernels.autograd import linear
from core.train.kernels.fused.operators import rms_norm, serves, silu_gate
from core.train.kernels.triton import probe
from core.train.quant.int8 import quantize_int8
from core.train.quant.layout import dynamic_map
from core.train.quant.nf4 import quantize_nf4

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OFF = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
"""Of the norm of a product of few rows, from float64: y's own rounding, and sums of thousands in float32."""


def _random(format: str, n: int, device: torch.device, double: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Any bytes and positive scales, made on the device."""
    generator = torch.Generator(device).manual_seed(n)

    def some(count: int, dtype: torch.dtype) -> Tensor:
        low, high = (-127, 128) if dtype == torch.int8 else (0, 256)
        return torch.randint(low, high, (count,), generator=generator, device=device, dtype=dtype)

    def scales(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=device) * 0.05 + 0.01

    blocks = -(-n // 64)
    if format == "int8":
        return some(n, torch.int8), [scales(blocks)]
    if not double:
        return some(-(-n // 2), torch.uint8), [scales(blocks)]
    nested = [scales(-(-blocks // 256)), dynamic_map(torch.device("cpu")).to(device), scales(1)[0]]
    return some(-(-n // 2), torch.uint8), [some(blocks, torch.uint8), *nested]


def test_this_build_of_torch_brings_it(device: torch.device) -> None:
    if device.type == "cuda":
        assert probe.unavailable(device) is None
        assert interface.describe(device)["backend"] == "triton"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 4096 * 14336, 4096 * 14336 - 33, 64 * 256 * 7 + 1], ids=str)
@pytest.mark.parametrize("format", ["nf4", "nf4-single", "int8"])
def test_unpacks_to_the_portable_bits(device: torch.device, format: Any, n: int, dtype: torch.dtype) -> None:
    packed, scales = _random(format[:4], n, device, double=format == "nf4")
    ours, wanted = (torch.full((n,), 7.0, dtype=dtype, device=device) for _ in range(2))
    interface.dequantize_into(ours, packed, scales, "int8" if format == "int8" else "nf4", 64)
    interface.dequantize_with("portable", wanted, packed, scales, "int8" if format == "int8" else "nf4", 64)
    assert torch.equal(ours, wanted)


def test_unpacks_past_2_to_the_31(device: torch.device) -> None:
    """The output head of a large vocabulary; some 12 GiB, so only where they are free."""
    n = 2**31 + 64 * 1000
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] < 14 * 2**30:
        return
    packed, scales = _random("nf4", n, device)
    ours = torch.empty(n, dtype=torch.bfloat16, device=device)
    interface.dequantize_into(ours, packed, scales, "nf4", 64)
    tail = 64 * 256 * 5 + 64 * 1000  # begins with a group of blocks
    first = (n - tail) // (64 * 256) * (64 * 256)
    wanted = torch.empty(n - first, dtype=torch.bfloat16, device=device)
    rest = [scales[0][first // 64 :], scales[1][first // 64 // 256 :], *scales[2:]]
    interface.dequantize_with("portable", wanted, packed[first // 2 :], rest, "nf4", 64)
    assert torch.equal(ours[first:], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096), (14336, 4096), (4096, 14336), (1000, 576), (77, 2500)], ids=str)
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_few_rows_are_the_product(
    device: torch.device, format: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n, k = shape
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, k, generator=generator) * 0.02
    weight: Any = quantize_nf4(values) if format == "nf4" else quantize_int8(values)
    packed, scales = weight.packed.to(device), [scale.to(device) for scale in weight.scales]
    dense = torch.empty(n * k, device=device)
    interface.dequantize_with("portable", dense, packed, scales, format, 64)
    bias = torch.randn(n, generator=generator).to(device)
    for m in (1, 2, 3, 5, 8):
        x = torch.randn(m, k, generator=generator).to(device, dtype)
        with torch.no_grad():
            y, again = (linear(x, packed, scales, format, 64, n, bias) for _ in range(2))
        wanted = torch.nn.functional.linear(x.double(), dense.view(n, k).double(), bias.double())
        assert (y.double() - wanted).norm() < OFF[dtype] * wanted.norm()
        assert torch.equal(y, again)  # nothing depends on which program ends first


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 577, 4096, 16384])
def test_norms_and_gates_are_those_of_float64(device: torch.device, dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, y, above = (torch.randn(300, width, generator=generator).to(device, dtype) for _ in range(3))
    weight = torch.randn(width, generator=generator).to(device, dtype)
    if not serves(x, y, weight):
        return  # float16 on a CPU
    a, b = (t.double().requires_grad_() for t in (x, y))
    x, y = x.requires_grad_(), y.requires_grad_()
    normed = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6)
    pairs: list[tuple[Tensor, Tensor]] = [
        (rms_norm(x, weight, 1e-6, from_one=False), normed * weight.double()),
        (rms_norm(x, weight, 1e-6, from_one=True), normed * (1.0 + weight.double())),
        (silu_gate(x, y), torch.nn.functional.silu(a) * b),
    ]
    for found, wanted in list(pairs):
        leaves = ([x, y], [a, b]) if found is pairs[2][0] else ([x], [a])
        theirs = torch.autograd.grad(wanted, leaves[1], above.double(), retain_graph=True)
        pairs += zip(torch.autograd.grad(found, leaves[0], above), theirs, strict=True)
    for found, wanted in pairs:
        assert (found.double() - wanted).norm() < 3 * OFF[dtype] * wanted.norm()
