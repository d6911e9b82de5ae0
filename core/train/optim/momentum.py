"""Optimizers of a few lines over lists of tensors: Lion, AdEMAMix and Sophia-G."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]


def with_gradient(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of a group that have a gradient, and the gradients."""
    found: list[Tensor] = [p for p in group["params"] if p.grad is not None]
    return found, [p.grad for p in found if p.grad is not None]


def each_with_gradient(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
    """(group, parameter, gradient) of every parameter that has one."""
    for group in optimizer.param_groups:
        for parameter, gradient in zip(*with_gradient(group), strict=True):
            yield group, parameter, gradient


class LionOptimizer(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675, algorithm 2)."""

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients = with_gradient(group)
            if not parameters:
                continue
            means = [self._mean(p) for p in parameters]
            (fast, slow), lr = group["betas"], group["lr"]
            updates = torch._foreach_lerp(gradients, means, fast)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(parameters, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-lr)
            torch._foreach_lerp_(means, gradients, 1.0 - slow)

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        mean: Tensor = state["exp_avg"]
        return mean


class SophiaOptimizer(torch.optim.Optimizer):
    """Sophia-G (arXiv:2305.14342, algorithm 3): a mean of the gradient over the curvature, each step clipped to the
    learning rate. `estimate` is called every `update_period` steps (core/train/evaluation/curvature.py)."""

    def __init__(
        self, groups: Groups, lr: float, betas: tuple[float, float], rho: float, eps: float, update_period: int
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "rho": rho, "eps": eps, "weight_decay": 0.0})
        self.update_period = update_period

    @torch.no_grad()
    def estimate(self, factor: float) -> None:
        """Take the squares of the gradients, times `factor`, into the mean of the curvature."""
        for group in self.param_groups:
            parameters, gradients = with_gradient(group)
            if parameters:
                curvature = [self._state(p)["hessian"] for p in parameters]
                second = group["betas"][1]
                torch._foreach_mul_(curvature, second)
                torch._foreach_addcmul_(curvature, gradients, gradients, value=(1.0 - second) * factor)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients = with_gradient(group)
            if not parameters:
                continue
            states = [self._state(p) for p in parameters]
            means = [state["exp_avg"] for state in states]
            torch._foreach_lerp_(means, gradients, 1.0 - group["betas"][0])
            below = torch._foreach_mul([state["hessian"] for state in states], group["rho"])
            torch._foreach_clamp_min_(below, group["eps"])
            updates = torch._foreach_div(means, below)
            torch._foreach_clamp_min_(updates, -1.0)
            torch._foreach_clamp_max_(updates, 1.0)
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            for name in ("exp_avg", "hessian"):
                state[name] = torch.zeros_like(parameter)
        return state


class SlowMeanAdamW(torch.optim.Optimizer):
    """AdEMAMix (arXiv:2409.03137, algorithm 1): AdamW whose update adds `alpha` times a slow mean of the gradient.

    Over `warmup` steps alpha rises linearly, and the half-life of the slow mean from that of the fast one; both follow
    from the counter of each parameter.
    """

    def __init__(
        self, groups: Groups, lr: float, betas: tuple[float, float, float], alpha: float, warmup: int, eps: float
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "alpha": alpha, "warmup": warmup, "eps": eps, "weight_decay": 0.0}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters, gradients = with_gradient(group)
            states = [self._state(p) for p in parameters]
            for step in sorted({int(state["step"]) for state in states}):  # one, as a rule
                at = [place for place, state in enumerate(states) if int(state["step"]) == step]
                self._step(
                    group,
                    step + 1,
                    [parameters[place] for place in at],
                    [gradients[place] for place in at],
                    [states[place] for place in at],
                )

    def _step(
        self,
        group: dict[str, Any],
        step: int,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Tensor]],
    ) -> None:
        first, second, third = group["betas"]
        alpha, slow_decay = group["alpha"], third
        if step < group["warmup"]:
            share = step / group["warmup"]
            alpha, slow_decay = alpha * share, slow_mean_decay(first, third, share)
        fast, slow, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"))
        torch._foreach_add_([state["step"] for state in states], 1.0)
        torch._foreach_lerp_(fast, gradients, 1.0 - first)
        torch._foreach_lerp_(slow, gradients, 1.0 - slow_decay)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - second)
        updates = torch._foreach_div(fast, 1.0 - first**step)
        torch._foreach_add_(updates, slow, alpha=alpha)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, math.sqrt(1.0 - second**step))
        torch._foreach_add_(below, group["eps"])
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, updates, below, value=-group["lr"])

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter)
        return state


def slow_mean_decay(start: float, end: float, share: float) -> float:
    """The decay whose half-life is `share` of the way from that of `start` to that of `end` (section 3.1)."""
    if start <= 0.0 or end <= 0.0:
        return end * share
    first, last = math.log(start), math.log(end)
    return math.exp(first * last / ((1.0 - share) * last + share * first))
