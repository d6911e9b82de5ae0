"""Learning rate over time: pure functions of the optimizer step, with transformers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import assert_never

from core.plan.steps import warmup_steps
from core.spec.axes.optimizer import Cosine, Linear, Schedule


def build_schedule(spec: Schedule, total_steps: int) -> Callable[[int], float]:
    """Factor on the peak learning rate at a 0-based step. As `transformers.get_linear_schedule_with_warmup` and
    `get_cosine_schedule_with_warmup`."""
    warmup = warmup_steps(total_steps, spec.warmup_ratio)
    rest = max(1, total_steps - warmup)

    def linear(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, (total_steps - step) / rest)

    def cosine(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / rest))))

    match spec:
        case Linear():
            return linear
        case Cosine():
            return cosine
        case _ as never:
            assert_never(never)
