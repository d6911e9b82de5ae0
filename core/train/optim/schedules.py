"""Learning rate over time: pure functions of the optimizer step (and of the evaluations so far, in
adaptive_schedules.py), with transformers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, assert_never

from core.plan.steps import warmup_steps
from core.spec.axes.optim.schedules import (
    Constant,
    ConstantWithWarmup,
    CosineWarmupWithMinLR,
    CosineWithMinLR,
    CosineWithRestarts,
    GreedyLR,
    InverseSqrt,
    Polynomial,
    ReduceLROnPlateau,
    WarmupStableDecay,
)
from core.spec.axes.optimizer import Cosine, Linear, Schedule
from core.train.optim.adaptive_schedules import greedy_factor, plateau_factor

Factor = Callable[[int], float]
"""Factor on the peak learning rate at a 0-based optimizer step."""
History = Callable[[], Sequence[Mapping[str, float]]]
"""The evaluations so far, in the order of their steps, `step` among the values of each."""

TIMESCALE = 10_000
"""Steps of `inverse_sqrt` without a warm-up; fairseq's."""


def build_schedule(
    spec: Schedule,
    total_steps: int,
    history: History = tuple,
    *,
    metric: str = "eval_loss",
    better: Literal["lower", "higher"] = "lower",
) -> Factor:
    """The factor on the peak learning rate at each step of `total_steps`, as `transformers.get_scheduler` has it.

    `history`, `metric` and `better` are for schedules that follow evaluations; those of the untrained model (step 0) do
    not count.
    """
    warmup = warmup_steps(total_steps, spec)
    rest = max(1, total_steps - warmup)

    def warming(after: Factor) -> Factor:
        return lambda step: step / max(1, warmup) if step < warmup else after(step)

    def progress(step: int) -> float:
        return (step - warmup) / rest

    def scores() -> list[float]:
        sign = 1.0 if better == "lower" else -1.0
        return [sign * values[metric] for values in history() if values["step"] > 0]

    match spec:
        case Linear():
            return warming(lambda step: max(0.0, (total_steps - step) / rest))
        case Cosine():
            return warming(lambda step: _cosine(progress(step)))
        case CosineWithRestarts(num_cycles=cycles):
            return warming(lambda step: 0.0 if progress(step) >= 1.0 else _cosine((cycles * progress(step)) % 1.0))
        case CosineWithMinLR(min_lr_rate=least):
            return warming(lambda step: _above(_cosine(progress(step)), least))
        case CosineWarmupWithMinLR():
            return _cosine_warmup(spec, warmup, rest)
        case Polynomial(power=power, min_lr_rate=least):
            return warming(lambda step: _above(max(0.0, 1.0 - progress(step)) ** power, least))
        case Constant():
            return lambda step: 1.0
        case ConstantWithWarmup():
            return warming(lambda step: 1.0)
        case InverseSqrt():
            timescale = spec.timescale or warmup or TIMESCALE
            return warming(lambda step: 1.0 / math.sqrt((step + timescale - warmup) / timescale))
        case WarmupStableDecay():
            return _stable_then_decay(spec, warmup, total_steps)
        case ReduceLROnPlateau():
            return warming(lambda step: plateau_factor(spec, scores()))
        case GreedyLR():
            return warming(lambda step: greedy_factor(spec, scores()))
        case _ as never:
            assert_never(never)


def _cosine(progress: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def _above(factor: float, least: float) -> float:
    """A factor from 0 to 1 as one from `least` to 1."""
    return factor * (1.0 - least) + least


def _cosine_warmup(spec: CosineWarmupWithMinLR, warmup: int, rest: int) -> Factor:
    def factor(step: int) -> float:
        if step >= warmup:
            return _above(_cosine((step - warmup + 1.0) / rest), spec.min_lr_rate)
        if spec.warmup_lr_rate is None:
            return (step + 1.0) / warmup
        return spec.warmup_lr_rate + (1.0 - spec.warmup_lr_rate) * step / max(1, warmup - 1)

    return factor


def _stable_then_decay(spec: WarmupStableDecay, warmup: int, total_steps: int) -> Factor:
    wanted = spec.decay_steps if spec.decay_ratio is None else math.ceil(total_steps * spec.decay_ratio)
    assert wanted is not None, "the spec has one of both"
    decay = min(wanted, max(0, total_steps - warmup))
    start = max(warmup, total_steps - decay)

    def shape(progress: float) -> float:
        match spec.decay_type:
            case "linear":
                return 1.0 - progress
            case "cosine":
                return _cosine(progress)
            case "1-sqrt":
                return 1.0 - math.sqrt(progress)
            case _ as never:
                assert_never(never)

    def factor(step: int) -> float:
        if step < warmup:
            return _above(step / warmup, spec.min_lr_rate)
        if step < start:
            return 1.0
        return _above(shape((step - start) / decay), spec.min_lr_rate) if step < start + decay else spec.min_lr_rate

    return factor
