"""Matrix products as training makes them, a LoRA's narrow ones, and the optimizer's step."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional
from torch.optim.adamw import adamw as adamw_step

from core.hardware.selftest import MANY_ROWS, WIDE_RANK
from core.hardware.tables.arch import ROWS
from core.train.quant import fp8
from core.train.selftest.measure import (
    DTYPES,
    Measured,
    SelftestCheck,
    difference,
    draw,
    gradients_of,
    rounded,
    rounding,
)

FP8 = {row.arch for row in ROWS if row.fp8 != "none"}
TALL = MANY_ROWS + 2**10
"""gfx1201 computes float32 products of more than 2^19 rows wrongly (core/hardware/tables/faults.py)."""


def checks(device: torch.device) -> list[SelftestCheck]:
    found = [SelftestCheck(f"matmul.{dtype}", partial(_matmul, dtype)) for dtype in DTYPES]
    found += [
        SelftestCheck(f"lora.r{r}.{dtype}", partial(_lora, r, dtype)) for r in (8, 16, WIDE_RANK) for dtype in DTYPES
    ]
    if device.type != "cpu":
        found.append(SelftestCheck("rows.fp32", many_rows))
        if fp8.installed() and device_arch(device) in FP8:
            found.append(SelftestCheck("fp8.linear", fp8_linear))
    return [*found, SelftestCheck("optimizer.adamw", adamw)]


def _sizes(device: torch.device) -> tuple[int, int, int]:
    """Rows, inner and outer size. On a GPU those of a real layer: faults hide at small ones (an outer size of 3,072
    faults on gfx1151)."""
    return (64, 256, 192) if device.type == "cpu" else (1024, 2048, 3072)


def _matmul(dtype: str, device: torch.device) -> Measured:
    rows, inner, outer = _sizes(device)
    x, exact_x = rounded(draw(1, rows, inner), dtype, device)
    w, exact_w = rounded(draw(2, outer, inner), dtype, device)
    bias, exact_bias = rounded(draw(3, outer), dtype, device)
    pairs = [
        (functional.linear(x, w, bias), exact_x @ exact_w.t() + exact_bias),
        (x.t() @ x, exact_x.t() @ exact_x),
    ]
    steps = 4.0 if dtype != "fp32" else 256.0
    return Measured(
        difference(pairs),
        *rounding(dtype, steps, "a sum of products, parts of which a library may round by themselves"),
    )


def _lora(r: int, dtype: str, device: torch.device) -> Measured:
    """y = x·Wᵀ + 2·(x·Aᵀ)·Bᵀ and its gradients, A and B in float32 under autocast as PEFT has them."""
    rows, inner, outer = _sizes(device)
    x, exact_x = rounded(draw(1, rows, inner), dtype, device)
    w, exact_w = rounded(draw(2, outer, inner, scale=inner**-0.5), dtype, device)
    a, exact_a = rounded(draw(3, r, inner, scale=inner**-0.5), dtype, device)
    b, exact_b = rounded(draw(4, outer, r, scale=0.5), dtype, device)
    up, exact_up = rounded(draw(5, rows, outer), dtype, device)
    a, b = a.float(), b.float()
    leaves = [t.requires_grad_() for t in (x, a, b)]
    exact = [t.requires_grad_() for t in (exact_x, exact_a, exact_b)]
    with torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "fp32"):
        y = functional.linear(x, w) + 2.0 * functional.linear(functional.linear(x, a), b)
    wanted = exact_x @ exact_w.t() + 2.0 * (exact_x @ exact_a.t()) @ exact_b.t()
    gradients = gradients_of(y, leaves, up)
    expected = gradients_of(wanted, exact, exact_up)
    steps = 8.0 if dtype != "fp32" else 256.0
    return Measured(
        difference([(y, wanted), *zip(gradients, expected, strict=True)]),
        *rounding(dtype, steps, "four products in a row and their sum"),
    )


def many_rows(device: torch.device) -> Measured:
    """The last rows of a very tall product; the first ones were never wrong."""
    x, w = draw(1, 1024, 32), draw(2, 32, 32)
    tall = x.float().to(device).repeat(TALL // 1024, 1)
    found = (tall @ w.float().to(device)).view(-1, 1024, 32)
    exact = x.float().double() @ w.float().double()
    pairs = [(found[block], exact) for block in (0, found.shape[0] // 2, found.shape[0] - 1)]
    return Measured(difference(pairs), *rounding("fp32", 16.0, "one sum of 32 products"))


def fp8_linear(device: torch.device) -> Measured:
    """A linear layer as torchao computes it, forward and backward."""
    rows, inner, outer = _sizes(device)
    x, exact_x = rounded(draw(1, rows, inner), "bf16", device)
    w, exact_w = rounded(draw(2, outer, inner), "bf16", device)
    up, exact_up = rounded(draw(3, rows, outer), "bf16", device)
    layer = torch.nn.Sequential(torch.nn.Linear(inner, outer, bias=False, dtype=torch.bfloat16, device=device))
    next(layer.parameters()).data.copy_(w)
    fp8.to_fp8(layer, emulate=device.type == "cpu")
    leaves, exact = [x.requires_grad_(), next(layer.parameters())], [exact_x.requires_grad_(), exact_w.requires_grad_()]
    y, wanted = layer(x), exact_x @ exact_w.t()
    gradients = gradients_of(y, leaves, up)
    expected = gradients_of(wanted, exact, exact_up)
    gap = difference([(y, wanted), *zip(gradients, expected, strict=True)])
    return Measured(gap, 0.125, "operands of 3 (gradients: 2) bits of mantissa, errors that average out in a sum")


def device_arch(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def adamw(device: torch.device) -> Measured:
    """Three fused steps on the device against three of the plain float64 form. The functions behind torch.optim.AdamW:
    the class imports torch's compiler, which takes longer than all parts together."""
    start, gradients = draw(1, 4096), [draw(2 + step, 4096) for step in range(3)]
    results = []
    for where, dtype, fused in ((device, torch.float32, True), (torch.device("cpu"), torch.float64, False)):
        parameter = start.float().to(dtype).to(where)
        first, second, steps = torch.zeros_like(parameter), torch.zeros_like(parameter), torch.zeros((), device=where)
        for gradient in gradients:
            adamw_step(
                [parameter], [gradient.float().to(dtype).to(where)], [first], [second], [], [steps],
                foreach=False, fused=fused, amsgrad=False, beta1=0.9, beta2=0.999, lr=1e-2, weight_decay=0.1, eps=1e-8,
                maximize=False,
            )  # fmt: skip
        results.append(parameter)
    return Measured(difference([(results[0], results[1])]), *rounding("fp32", 64.0, "a root and a quotient a step"))
