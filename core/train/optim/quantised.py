"""AdamW with both means quantised block by block (arXiv:2110.02861 in 8 bits, arXiv:2309.01507 in 4).

A block shares a float32 scale, its largest magnitude; a value is the place of the nearest entry of a map of 256 or 16.
Two codes of 4 bits share a byte, the first of them in the high half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from core.plan.optimizers import QUANTISED_FROM
from core.train.optim.momentum import Groups, with_gradient
from core.train.quant.layout import dynamic_map

Maps = Callable[[torch.device], tuple[Tensor, Tensor]]
"""The map of signed values and that of values which are never negative, float32 in rising order."""
NAMES = ("exp_avg_q", "exp_avg_sq_q")
PIECE = 1 << 20
"""Values that are unpacked at once: their means, gradients and bounds stay small beside the state."""


@cache
def maps_8bit(device: torch.device) -> tuple[Tensor, Tensor]:
    """The dynamic maps of bitsandbytes; the unsigned one has a bit more for its fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + 1) + 1, dtype=torch.float32)
        values += (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
    return dynamic_map(device), torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def maps_4bit(device: torch.device) -> tuple[Tensor, Tensor]:
    """The signed dynamic map of 4 bits, and a linear one without zero."""
    values = [0.0, 1.0]
    for exponent in range(3):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 2) * ((edges[:-1] + edges[1:]) / 2.0)
        values += means.tolist() + (-means).tolist()
    signed = torch.tensor(sorted(values), dtype=torch.float32, device=device)
    return signed, torch.linspace(0, 1, 17, dtype=torch.float32, device=device)[1:]


def pack(values: Tensor, table: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor]:
    """(uint8 codes, float32 scales) of float32 values [n]; n is a multiple of `block`, but for the last piece."""
    n = values.numel()
    padded = nn.functional.pad(values, (0, -n % block)).view(-1, block)
    scales = padded.abs().amax(dim=1)
    scaled = (padded / scales.clamp(min=1e-12).unsqueeze(1)).view(-1)[:n]
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2).to(torch.uint8)
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


class QuantisedAdamW(torch.optim.Optimizer):
    """AdamW's step over quantised means; a tensor of fewer than QUANTISED_FROM values keeps float32 means."""

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        bits: int,
        block: int,
        maps: Maps,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._bits, self._block, self._maps = bits, block, maps

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter, gradient in zip(*with_gradient(group), strict=True):
                state = self._state(parameter)
                state["step"] += 1
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                if "exp_avg" in state:
                    _adam(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], group, int(state["step"]))
                else:
                    self._step_in_pieces(parameter, gradient, state, group)

    def _step_in_pieces(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        bits, block, maps = self._bits, self._block, self._maps(parameter.device)
        flat = parameter.view(-1)
        gradient = gradient.reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            n = min(PIECE, flat.numel() - start)
            codes = slice(start * bits // 8, -(-(start + n) * bits // 8))
            scales = slice(start // block, -(-(start + n) // block))
            mean, square = (
                unpack(state[name][codes], state[f"{name}_scale"][scales], table, block, bits, n)
                for name, table in zip(NAMES, maps, strict=True)
            )
            _adam(flat[start : start + n], gradient[start : start + n], mean, square, group, int(state["step"]))
            for name, table, values in zip(NAMES, maps, (mean, square), strict=True):
                state[name][codes], state[f"{name}_scale"][scales] = pack(values, table, block, bits)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if state:
            return state
        if not parameter.is_contiguous():
            raise ValueError("a trained parameter is not contiguous, so its means cannot be cut into blocks")
        state["step"] = torch.tensor(0.0)
        if parameter.numel() < QUANTISED_FROM:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            return state
        n, device = parameter.numel(), parameter.device
        for name in NAMES:  # scales of zero: whatever the codes, the means are zero
            state[name] = torch.zeros(-(-n * self._bits // 8), dtype=torch.uint8, device=device)
            state[f"{name}_scale"] = torch.zeros(-(-n // self._block), device=device)
        return state


def _adam(parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, group: dict[str, Any], step: int) -> None:
    """Update the means and the parameter in place."""
    first, second = group["betas"]
    mean.lerp_(gradient, 1.0 - first)
    square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
    below = (square.sqrt() / (1.0 - second**step) ** 0.5).add_(group["eps"])
    parameter.addcdiv_(mean, below, value=-group["lr"] / (1.0 - first**step))
