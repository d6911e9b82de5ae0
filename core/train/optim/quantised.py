"""AdamW with both means quantised block by block (arXiv:2110.02861 in 8 bits, arXiv:2309.01507 in 4).

The mean of squares is kept as its root. A block shares a float32 scale, its largest magnitude; a value is the place of
the nearest entry of a map of 256 or 16. Maps of roots have no zero: a step would be divided by it.
Two codes of 4 bits share a byte, the first of them in the high half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from core.plan.optimizers import QUANTISED_FROM
from core.train.kernels.adamw import AdamNumbers, QuantisedMeans, adam_step, pack, quantised_step, unpack
from core.train.kernels.native import adamw_step, serves
from core.train.optim.momentum import Groups, each_with_gradient
from core.train.quant.layout import dynamic_map

Maps = Callable[[torch.device], tuple[Tensor, Tensor]]
"""The map of signed values and that of values which are never negative, float32 in rising order."""
NAMES = ("exp_avg_q", "exp_avg_sq_root_q")
SQUARES = "exp_avg_sq_q"
"""In checkpoints of versions before: codes of the mean of squares itself."""


@cache
def maps_8bit(device: torch.device) -> tuple[Tensor, Tensor]:
    """The dynamic maps of bitsandbytes; the unsigned one has a bit more for its fraction, and in the place of its zero
    a value in its widest gap."""
    return dynamic_map(device), _unsigned(1.3e-6, device)


def _unsigned(value: float, device: torch.device) -> Tensor:
    """The unsigned dynamic map of 8 bits, with a value in the place of its zero."""
    values = [value, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + 1) + 1, dtype=torch.float32)
        values += (10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


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
        for group, parameter, gradient in each_with_gradient(self):
            state = self._state(parameter)
            state["step"] += 1
            numbers = AdamNumbers.of_step(group, int(state["step"]))
            if "exp_avg" in state:
                adam_step(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], numbers)
                continue
            (mean, of_mean), (root, of_root) = ((state[name], state[f"{name}_scale"]) for name in NAMES)
            maps = self._maps(parameter.device)
            means = QuantisedMeans(mean, of_mean, root, of_root, maps, self._block, self._bits)
            flat = parameter.view(-1)
            compiled = flat.device.type == "cpu" and flat.dtype == torch.float32 and serves(flat.dtype)
            (adamw_step if compiled else quantised_step)(flat, gradient.reshape(-1), means, numbers)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if SQUARES in state:
            self._take_roots(state, parameter.numel())
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

    def _take_roots(self, state: dict[str, Tensor], n: int) -> None:
        """Go on from the state of a version before."""
        codes, scales = state.pop(SQUARES), state.pop(f"{SQUARES}_scale")
        roots = self._maps(codes.device)[1]
        old = _unsigned(0.0, codes.device) if self._bits == 8 else roots
        values = unpack(codes, scales, old, self._block, self._bits, n).sqrt_()
        state[NAMES[1]], state[f"{NAMES[1]}_scale"] = pack(values, roots, self._block, self._bits)
