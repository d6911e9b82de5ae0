"""The C kernels against torch, before a process uses them: a compiler or a processor that is wrong shows here."""

from __future__ import annotations

import ctypes
from functools import partial

import torch
from torch import Tensor

from core.train.kernels.adamw import AdamNumbers, QuantisedMeans, quantised_step
from core.train.kernels.c_code import calls
from core.train.kernels.c_code.build import NativeUnavailable
from core.train.kernels.c_code.calls import DTYPES, LoRAFactors


def try_out(kernels: ctypes.CDLL) -> None:
    """Every kernel against torch on a small case with a short last block."""
    from core.train.quant.int8 import dequantize_int8_into, quantize_int8
    from core.train.quant.nf4 import dequantize_nf4_into, quantize_nf4

    values = torch.randn(300 * 64 + 37, generator=torch.Generator().manual_seed(0))
    values[64:128] = 0.0
    values[5] = 80.0
    for dtype in DTYPES:
        for double in (True, False):
            nf4 = quantize_nf4(values, double=double)
            ours, wanted = torch.empty(values.numel(), dtype=dtype), torch.empty(values.numel(), dtype=dtype)
            calls.nf4(kernels, ours, nf4.packed, nf4.scales, 64)
            dequantize_nf4_into(wanted, nf4.packed, nf4.scales, 64)
            if not torch.equal(ours, wanted):
                raise NativeUnavailable(f"their NF4 in {dtype} differs from torch's on this processor")
        int8 = quantize_int8(values)
        calls.int8(kernels, ours, int8.packed, int8.scales, 64)
        dequantize_int8_into(wanted, int8.packed, int8.scales, 64)
        if not torch.equal(ours, wanted):
            raise NativeUnavailable(f"their int8 in {dtype} differs from torch's on this processor")
    _try_adamw(kernels, values)
    for dtype in DTYPES:
        _try_turn(kernels, values[: 2 * 5 * 3 * 14].view(2, 5, 3, 14).to(dtype), values[600 : 600 + 70].view(1, 5, 14))
    _try_softmax(kernels, values[:19200].view(6, 3200).to(torch.bfloat16))
    for dtype in DTYPES:
        _try_parts(kernels, values[:7000].view(7, 1000).to(dtype))
    if kernels.eft_few_rows():
        with torch.autocast("cpu", enabled=False):  # this may be the first call of a pass under autocast
            _try_few_rows(kernels, values[: 96 * 192].view(96, 192) / 80)


def _try_few_rows(kernels: ctypes.CDLL, values: Tensor) -> None:
    from core.train.quant.int8 import dequantize_int8_into, quantize_int8
    from core.train.quant.nf4 import dequantize_nf4_into, quantize_nf4

    n, width = values.shape
    found: list[tuple[Tensor, Tensor]] = []
    for dtype in DTYPES:
        x, dense = values[:7].to(dtype), torch.empty(n * width, dtype=dtype)
        for double in (True, False):
            nf4 = quantize_nf4(values, double=double)
            dequantize_nf4_into(dense, nf4.packed, nf4.scales, 64)
            ours = calls.few_rows(kernels, x, nf4.packed, nf4.scales, "nf4", 64, n)
            found.append((ours, x.float() @ dense.float().view(n, width).t()))
        int8 = quantize_int8(values)
        dequantize_int8_into(dense, int8.packed, int8.scales, 64)
        ours = calls.few_rows(kernels, x, int8.packed, int8.scales, "int8", 64, n)
        found.append((ours, x.float() @ dense.float().view(n, width).t()))
    a, b, bias = values[64:96], values.view(-1)[: 95 * 32].view(95, 32), values[1, :95].contiguous()
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, out = values[:7].to(dtype), values[:95].to(dtype), torch.empty(7, 95)
        calls.wide_product(kernels, x, weight, out, bias, LoRAFactors(a, b, 2.0, narrow=False), False)
        found.append((out, x.float() @ weight.float().t() + bias + 2.0 * (x.float() @ a.t() @ b.t())))
    if not all(torch.allclose(ours, right, rtol=1e-5, atol=1e-6) for ours, right in found):
        raise NativeUnavailable("their products of few rows differ from torch's on this processor")


def _try_adamw(kernels: ctypes.CDLL, values: Tensor) -> None:
    for bits, block in ((8, 256), (4, 128)):
        rising = torch.linspace(-1, 1, 1 << bits), torch.linspace(0, 1, 1 << bits)
        results = []
        for step in (partial(calls.adamw, kernels), quantised_step):
            parameter = values.clone()
            codes = (torch.zeros(-(-values.numel() * bits // 8), dtype=torch.uint8) for _ in range(2))
            scales = (torch.zeros(-(-values.numel() // block)) for _ in range(2))
            (mean, root), (of_mean, of_root) = codes, scales
            means = QuantisedMeans(mean, of_mean, root, of_root, rising, block, bits)
            for turn in (1, 2):
                numbers = AdamNumbers(0.99, 0.9, 0.999, (1.0 - 0.999**turn) ** -0.5, 1e-8, 1e-2)
                step(parameter, values / turn, means, numbers)
            results.append((parameter, mean, root, of_mean, of_root))
        if not all(map(torch.equal, *results)):
            raise NativeUnavailable(f"their AdamW of {bits} bits differs from torch's on this processor")


def _try_softmax(kernels: ctypes.CDLL, logits: Tensor) -> None:
    top, total = torch.empty(6), torch.empty(6)
    calls.softmax_stats(kernels, top, total, logits)
    wide = logits.float()
    wanted = (wide - wide.amax(1, keepdim=True)).exp()
    if not (torch.equal(top, wide.amax(1)) and torch.allclose(total, wanted.sum(1), rtol=1e-5)):
        raise NativeUnavailable("their softmax differs from torch's on this processor")
    factor, scaled = 1 / total, logits.clone()
    calls.softmax_scale_(kernels, scaled, top, factor)
    if not torch.allclose(scaled.float(), wanted * factor.unsqueeze(1), rtol=2**-7, atol=1e-30):
        raise NativeUnavailable("their softmax differs from torch's on this processor")


def _try_turn(kernels: ctypes.CDLL, x: Tensor, angles: Tensor) -> None:
    cosine, sine, out = angles.cos().to(x.dtype), angles.sin().to(x.dtype), torch.empty_like(x)
    c, s = (each.unsqueeze(2).chunk(2, -1) for each in (cosine, sine))
    low, high = x.chunk(2, -1)
    for back in (False, True):
        calls.turn(kernels, out, x, cosine, sine, back)
        first, second = high * s[int(back)], low * s[int(not back)]
        wanted = (low * c[0] + first, high * c[1] - second) if back else (low * c[0] - first, high * c[1] + second)
        if not torch.equal(out, torch.cat(wanted, -1)):
            raise NativeUnavailable(f"their rotary embedding in {x.dtype} differs from torch's on this processor")


def _try_parts(kernels: ctypes.CDLL, x: Tensor) -> None:
    """Gradients by their formulas: this may run below autograd, where a packed weight is dequantised first."""
    grad, weight, wide = x.roll(3, 1), x[2] * 0.1, x.float()
    up = grad.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    found: list[tuple[Tensor, Tensor]] = []
    for from_one, by in {False: weight.float(), True: 1.0 + weight.float()}.items():
        out, grad_x, scale = torch.empty_like(x), torch.empty_like(x), torch.empty(x.shape[0])
        calls.norm(kernels, out, scale, x, weight, 1e-6, from_one)
        calls.norm_grad(kernels, grad_x, grad, x, weight, scale, from_one)
        above = up * by
        wanted = root * above - wide * root.pow(3) * (above * wide).mean(-1, keepdim=True)
        found += [(out, wide * root * by), (grad_x, wanted)]
    opened = torch.sigmoid(wide)
    out, grad_gate, grad_up = (torch.empty_like(x) for _ in range(3))
    calls.gate(kernels, out, x, grad)
    calls.gate_grad(kernels, grad_gate, grad_up, grad, x, grad)
    found += [
        (out, wide * opened * up),
        (grad_gate, up * up * opened * (1.0 + wide * (1.0 - opened))),
        (grad_up, up * wide * opened),
    ]
    tolerance = 2.0**-6 if x.dtype == torch.bfloat16 else 1e-5
    for each, right in found:
        if not float((each.float() - right).abs().max()) <= tolerance * float(right.abs().max()):
            raise NativeUnavailable(f"their norm or gate in {x.dtype} differs from torch's on this processor")
