"""BAdam (Luo et al. 2024, arXiv:2404.02827, algorithm 1): AdamW over one block of the model at a time.

Only the block whose turn it is requires gradients and has means. Its turn follows from the counter of steps that every
parameter has, so a resumed run goes on in the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.spec.axes.optim.optimizers import BlockOrder
from core.train.optim.momentum import Groups, with_gradient


class BlockAdamW(torch.optim.Optimizer):
    """See the module. `blocks`: number of each parameter's block. `every`: steps of a turn."""

    def __init__(
        self,
        groups: Groups,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        *,
        blocks: Mapping[nn.Parameter, int],
        every: int,
        order: BlockOrder,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._blocks, self._every, self._order = blocks, every, order
        self._count = max(blocks.values()) + 1
        self.restored()

    @property
    def active(self) -> int:
        """Number of the block whose turn it is."""
        return block_of_turn(self._done() // self._every, self._count, self._order)

    def restored(self) -> None:
        """Let the block whose turn it is require gradients, and no other. Called after the state was restored."""
        active = self.active
        for parameter, block in self._blocks.items():
            parameter.requires_grad_(block == active)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        done = self._done()
        for group in self.param_groups:
            parameters, gradients = with_gradient(group)
            if parameters:
                self._update(group, parameters, gradients, done % self._every + 1)
        for parameter in self._blocks:
            state = self.state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            state["step"] += 1
        if (done + 1) % self._every == 0:
            for parameter in self._blocks:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter].pop(name, None)
            self.restored()

    def _update(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor], turn: int) -> None:
        means, squares = ([self._mean(p, name) for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
        (first, second), rate = group["betas"], group["lr"]
        torch._foreach_lerp_(means, gradients, 1.0 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - second)
        below = torch._foreach_sqrt(squares)
        torch._foreach_div_(below, (1.0 - second**turn) ** 0.5)
        torch._foreach_add_(below, group["eps"])
        torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
        torch._foreach_addcdiv_(parameters, means, below, value=-rate / (1.0 - first**turn))

    def _mean(self, parameter: Tensor, name: str) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        return state[name]

    def _done(self) -> int:
        """Optimizer steps so far."""
        state = self.state.get(next(iter(self._blocks)), {})
        return int(state["step"]) if "step" in state else 0


def block_of_turn(turn: int, count: int, order: BlockOrder) -> int:
    """The block of a turn; each has one turn before the first has another."""
    cycle, place = divmod(turn, count)
    match order:
        case "ascending":
            return place
        case "descending":
            return count - 1 - place
        case "random":
            return int(torch.randperm(count, generator=torch.Generator().manual_seed(cycle))[place])
