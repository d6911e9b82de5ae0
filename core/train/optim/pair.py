"""Two optimizers as one: each steps parameters of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class OptimizerPair(torch.optim.Optimizer):
    """One state and one list of groups over two optimizers, which read both when they step."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__(
            [{"params": group["params"]} for part in self.parts for group in part.param_groups], first.defaults
        )
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("a step has no closure here")
        for part in self.parts:
            part.step()
