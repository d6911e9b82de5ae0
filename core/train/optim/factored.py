"""Optimizers that keep the mean of the squared gradient by rows and columns, and whose updates have the size of what
they change: Adafactor and AdaLomo."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.train.optim.momentum import Groups, each_with_gradient

TINY = 1e-30
"""Added to squared gradients."""


class AdafactorOptimizer(torch.optim.Adafactor):
    """Adafactor (arXiv:1804.04235) with torch's formula, options and state. torch takes the norm of each column, which
    takes a CPU nine times as long as the mean of squares."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            eps, least = group["eps"]
            for parameter, gradient, rows, columns, variance, step in zip(*lists, strict=True):
                step += 1
                turn, root = step.item(), parameter.numel() ** 0.5
                forget = turn ** group["beta2_decay"]
                rate = max(least, parameter.norm().item() / root) * min(group["lr"], turn**-0.5)
                if group["weight_decay"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                tiny = torch.finfo(parameter.dtype).eps if eps is None else eps
                squares = gradient.square()
                if rows is None:
                    estimate = squares.copy_(variance.lerp_(squares, forget))
                else:
                    rows.lerp_(squares.mean(-1, keepdim=True), forget)
                    columns.lerp_(squares.mean(-2, keepdim=True), forget)
                    scaled = rows / rows.mean(-2, keepdim=True).clamp_(min=tiny)
                    estimate = torch.mul(scaled, columns, out=squares)
                update = estimate.clamp_(min=tiny * tiny).rsqrt_().mul_(gradient)
                shrink = max(1.0, update.norm().item() / (root * group["d"]))
                parameter.add_(update, alpha=-rate / shrink)


class AdaLomoOptimizer(torch.optim.Optimizer):
    """AdaLomo (arXiv:2310.10195, algorithm 1). The step is made when all gradients are there, not inside the backward:
    then clipping and accumulation work as with any other optimizer. `decay`: exponent of the step by which the means
    forget; `eps`: least size of a parameter."""

    def __init__(self, groups: Groups, lr: float, *, decay: float, eps: float, clip_threshold: float) -> None:
        defaults = {"lr": lr, "weight_decay": 0.0, "decay": decay, "eps": eps, "clip_threshold": clip_threshold}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in each_with_gradient(self):
            state = self._state(parameter)
            state["step"] += 1
            forget = float(state["step"]) ** group["decay"]
            squares = gradient.square().add_(TINY)
            if "exp_avg_sq" in state:
                scale = state["exp_avg_sq"].lerp_(squares, forget).rsqrt()
            else:
                rows = state["exp_avg_sq_row"].lerp_(squares.mean(-1), forget)
                columns = state["exp_avg_sq_col"].lerp_(squares.mean(-2), forget)
                of_rows = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
                scale = of_rows * columns.rsqrt().unsqueeze(-2)
            update = gradient * scale
            update /= (_rms(update) / group["clip_threshold"]).clamp(min=1.0)
            size = _rms(parameter).clamp(min=group["eps"])
            parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).sub_(update * (size * group["lr"]))

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if state:
            return state
        state["step"] = torch.tensor(0.0)
        if parameter.dim() < 2:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            return state
        state["exp_avg_sq_row"] = torch.zeros(parameter.shape[:-1], device=parameter.device)
        state["exp_avg_sq_col"] = torch.zeros((*parameter.shape[:-2], parameter.shape[-1]), device=parameter.device)
        return state


def _rms(values: Tensor) -> Tensor:
    size: Tensor = values.norm() / values.numel() ** 0.5
    return size
