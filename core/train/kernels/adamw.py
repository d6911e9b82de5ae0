"""AdamW's step over means that are quantised block by block, in portable torch: what native.c does faster, to the bit.

The mean of squares is kept as its root, which spans half as many orders of magnitude: of two gradients in one block,
1 and 1e-4, the square of the smaller would be lost, and its next step divided by almost nothing.

Every product and sum is an operation of its own, so that each is rounded once and in this order, wherever it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PIECE = 1 << 20
"""Values that are unpacked at once: their means, gradients and bounds stay small beside the state."""


@dataclass(frozen=True, slots=True)
class AdamNumbers:
    """The factors of one step."""

    keep: float
    """Factor of the weights: 1 - learning rate · weight decay."""
    first: float
    second: float
    root: float
    """1 / sqrt(1 - second ** step)."""
    eps: float
    rate: float
    """Learning rate / (1 - first ** step)."""

    @classmethod
    def of_step(cls, group: dict[str, Any], step: int) -> AdamNumbers:
        first, second = group["betas"]
        return cls(
            keep=1.0 - group["lr"] * group["weight_decay"],
            first=first,
            second=second,
            root=(1.0 - second**step) ** -0.5,
            eps=group["eps"],
            rate=group["lr"] / (1.0 - first**step),
        )


@dataclass(frozen=True, slots=True)
class QuantisedMeans:
    """The mean of n values, and the root of the mean of their squares."""

    mean: Tensor
    """Codes, uint8 [n · bits / 8]."""
    mean_scale: Tensor
    """Float32 [blocks]."""
    root: Tensor
    root_scale: Tensor
    maps: tuple[Tensor, Tensor]
    """What codes stand for, float32 in rising order."""
    block: int
    bits: int


def adam_step(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, numbers: AdamNumbers) -> Tensor:
    """Update float32 means and the parameter in place; the root of the new mean of squares."""
    parameter.mul_(numbers.keep)
    mean.mul_(numbers.first).add_(gradient * (1.0 - numbers.first))
    square.mul_(numbers.second).add_((gradient * gradient).mul_(1.0 - numbers.second))
    root = _sqrt(square)
    below = (root * numbers.root).add_(numbers.eps)
    parameter.sub_((mean / below).mul_(numbers.rate))
    return root


def _sqrt(values: Tensor) -> Tensor:
    """Rounded to nearest, as IEEE 754 has it. On a CPU torch may take the root from a library that is an ulp off;
    through float64 it comes out right."""
    return values.double().sqrt().float() if values.device.type == "cpu" else values.sqrt()


def quantised_step(parameter: Tensor, gradient: Tensor, means: QuantisedMeans, numbers: AdamNumbers) -> None:
    """Update flat float32 values [n] and their quantised means in place."""
    bits, block = means.bits, means.block
    both = (means.mean, means.mean_scale, means.maps[0]), (means.root, means.root_scale, means.maps[1])
    for start in range(0, parameter.numel(), PIECE):
        n = min(PIECE, parameter.numel() - start)
        codes = slice(start * bits // 8, -(-(start + n) * bits // 8))
        blocks = slice(start // block, -(-(start + n) // block))
        mean, root = (unpack(code[codes], scale[blocks], table, block, bits, n) for code, scale, table in both)
        root = adam_step(parameter[start : start + n], gradient[start : start + n], mean, root.square_(), numbers)
        for (code, scale, table), values in zip(both, (mean, root), strict=True):
            code[codes], scale[blocks] = pack(values, table, block, bits)


def bounds_of(table: Tensor) -> Tensor:
    """Between two entries of a map each: what is above is nearer to the next."""
    return (table[:-1] + table[1:]) / 2


def pack(values: Tensor, table: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """(uint8 codes, float32 scales) of float32 values [n]; n is a multiple of `block`, but for the last piece."""
    n = values.numel()
    padded = nn.functional.pad(values, (0, -n % block)).view(-1, block)
    scales = padded.abs().amax(dim=1)
    scaled = (padded / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).view(-1)[:n]
    codes = torch.bucketize(scaled, bounds_of(table)).to(torch.uint8)
    if bits == 4:
        codes = nn.functional.pad(codes, (0, n % 2)).view(-1, 2)
        codes = (codes[:, 0] << 4) | codes[:, 1]
    return codes, scales


def unpack(codes: Tensor, scales: Tensor, table: Tensor, block: int, bits: int, n: int) -> Tensor:
    """The float32 values [n] of `pack`."""
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], dim=1).view(-1)[:n]
    values = nn.functional.pad(table[codes.int()], (0, -n % block)).view(-1, block)
    return values.mul_(scales.unsqueeze(1)).view(-1)[:n]
