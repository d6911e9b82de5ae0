"""How far a result is from the exact one, and what rounding may make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-23}
"""Largest relative error of one rounding, but for float32: twice that (sums of float32 are rounded at each term)."""


class NotAvailable(Exception):
    """This build of torch has no such kernel for this device: no fault."""


@dataclass(frozen=True, slots=True)
class Measured:
    difference: float
    tolerance: float
    why: str


@dataclass(frozen=True, slots=True)
class SelftestCheck:
    """One part: `run` returns the result, or raises what the device's library raises."""

    name: str
    run: Callable[[torch.device], Measured]


def difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Over (found, exact) pairs the worst of: largest error over the largest exact value. A single wrong element shows
    in it, which a norm over all of them would hide. Infinite where a result is no number or has another shape."""
    worst = 0.0
    for found, exact in pairs:
        if found.shape != exact.shape:
            return float("inf")
        gap = (found.detach().to("cpu", torch.float64) - exact.detach().to("cpu", torch.float64)).abs().max()
        value = float(gap / exact.detach().to(torch.float64).abs().max().cpu().clamp(min=1e-30))
        worst = max(worst, value if value == value else float("inf"))
    return worst


def gradients_of(y: Tensor, leaves: Sequence[Tensor], above: Tensor) -> tuple[Tensor, ...]:
    """Those of `leaves`, where `above` comes from above `y`. The same, to the bit, are those of a sum of products: a
    gradient that it is given torch checks by its symbolic shapes, whose import takes longer than all parts together."""
    return torch.autograd.grad((y * above).sum(), leaves)


def rounding(dtype: str, steps: float, what: str) -> tuple[float, str]:
    """(tolerance, reason): `steps` roundings to `dtype`, of `what`."""
    return steps * EPSILON[dtype], f"{steps:g} roundings to {dtype}: {what}"


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64, the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def rounded(values: Tensor, dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(on the device in `dtype`, on the CPU in float64), the same numbers."""
    there = values.to(DTYPES[dtype])
    return there.to(device), there.double()
