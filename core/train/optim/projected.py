"""AdamW's means in a space of few dimensions: GaLore and APOLLO.

The gradient of a hidden matrix [m, n] is projected along its smaller side to `rank` dimensions, and the two means are
kept of that. The projection changes every `gap` steps. All other parameters have AdamW's full means.

GaLore      singular vectors of the gradient; the update is projected back and scaled (arXiv:2403.03507, algorithm 2)
APOLLO      random numbers; the gradient itself is the update, each column (`mini`: the whole) scaled as AdamW scales
            its projection (arXiv:2412.05270, algorithm 1), and growing by 1 % a step at most
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from core.train.linalg.singular import largest_singular
from core.train.optim.momentum import Groups, each_with_gradient

Kind = Literal["galore", "apollo", "apollo_mini"]
GROWTH = 1.01
"""Largest ratio of the norms of two updates of APOLLO."""


class ProjectedAdamW(torch.optim.Optimizer):
    """See the module. A group with `rank` above 0 is of matrices that are projected."""

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        kind: Kind,
        gap: int,
        scale: float,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "rank": 0, "gap": gap, "scale": scale}
        super().__init__(groups, defaults)
        self._kind = kind
        every = [p for group in self.param_groups for p in group["params"]]
        self._seeds = {p: number for number, p in enumerate(every)}
        """Seeds of random projections: the same in every rank and after a resume."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in each_with_gradient(self):
            state: dict[str, Tensor] = self.state[parameter]
            if group["rank"] and self._kind == "galore":
                self._galore(parameter, gradient, state, group)
                continue
            update = self._apollo(parameter, gradient, state, group) if group["rank"] else _adam(gradient, state, group)
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _galore(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Decay, projection back and step are one product, which writes the parameter once."""
        wide = gradient.shape[0] < gradient.shape[1]
        tall = gradient.t() if wide else gradient  # [larger, smaller]
        if _is_due(state, group):
            _, _, right = largest_singular(tall, group["rank"])
            state["projection"] = right.contiguous()
        along = state["projection"]
        moved = _adam(tall @ along.t(), state, group)  # [larger, rank]
        factors = (along.t(), moved.t()) if wide else (moved, along)  # as the parameter lies in memory
        kept = 1.0 - group["lr"] * group["weight_decay"]
        parameter.addmm_(*factors, beta=kept, alpha=-group["lr"] * group["scale"])

    def _apollo(self, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
        wide, rank = gradient.shape[0] < gradient.shape[1], group["rank"]
        tall = gradient.t() if wide else gradient
        if _is_due(state, group):
            turn = int(state["step"]) // group["gap"] if state else 0
            generator = torch.Generator().manual_seed(self._seeds[parameter] * 1_000_003 + turn)
            drawn = torch.randn(rank, tall.shape[1], generator=generator) / rank**0.5
            state["projection"] = drawn.to(gradient.device)
        if "norm" not in state:
            state["norm"] = torch.zeros(1, device=gradient.device)
        low = tall @ state["projection"].t()  # [larger, rank]
        moved = _adam(low, state, group)
        if self._kind == "apollo_mini":
            factor = moved.norm() / low.norm().clamp(min=1e-30)
        else:
            factor = moved.norm(dim=1, keepdim=True) / low.norm(dim=1, keepdim=True).clamp(min=1e-30)
        update: Tensor = tall * factor * group["scale"]
        norm, before = update.norm(), state["norm"]
        limited = torch.where((before > 0) & (norm > GROWTH * before), GROWTH * before / norm.clamp(min=1e-30), 1.0)
        state["norm"] = (norm * limited).view(1)
        update = update * limited
        return update.t() if wide else update


def _is_due(state: dict[str, Tensor], group: dict[str, Any]) -> bool:
    """Whether the projection of this step is a new one."""
    return "projection" not in state or int(state["step"]) % group["gap"] == 0


def _adam(gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """AdamW's update before the learning rate; the means are changed."""
    if "step" not in state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(gradient.shape, device=gradient.device) for _ in range(2))
    state["step"] += 1
    step, (first, second) = int(state["step"]), group["betas"]
    state["exp_avg"].lerp_(gradient, 1.0 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
    below = state["exp_avg_sq"].sqrt().div_((1.0 - second**step) ** 0.5).add_(group["eps"])
    return torch.div(state["exp_avg"], below.mul_(1.0 - first**step), out=below)
