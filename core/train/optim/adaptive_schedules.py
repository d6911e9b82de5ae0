"""Schedules that follow the evaluations: the factor is computed anew from the scores of all evaluations so far, which
every checkpoint holds, so there is no state of its own to lose.

Scores are lower for better models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from core.spec.axes.optim.schedules import GreedyLR, ReduceLROnPlateau


def plateau_factor(spec: ReduceLROnPlateau, scores: Iterable[float]) -> float:
    """As `torch.optim.lr_scheduler.ReduceLROnPlateau` with a relative threshold."""
    factor, best, bad, cooldown = 1.0, math.inf, 0, 0
    for score in scores:
        if _improved(score, best, spec.threshold):
            best, bad = score, 0
        else:
            bad += 1
        if cooldown > 0:
            cooldown -= 1
            bad = 0
        if bad > spec.patience:
            factor = max(factor * spec.factor, spec.min_lr_rate)
            cooldown, bad = spec.cooldown, 0
    return factor


def greedy_factor(spec: GreedyLR, scores: Iterable[float]) -> float:
    """As `transformers.optimization.GreedyLR` with an absolute threshold and no smoothing."""
    factor, best, good, bad, pause, left = 1.0, math.inf, 0, 0, 0, spec.reset_after
    for score in scores:
        if pause > 0:
            pause, good, bad = pause - 1, 0, 0
            continue
        if score < best - spec.threshold:
            best, good, bad = score, good + 1, 0
        else:
            good, bad = 0, bad + 1
        if good > spec.patience:
            factor = min(factor / spec.factor, spec.max_lr_rate)
            pause, good, left = spec.rise_cooldown, 0, spec.reset_after
        elif bad > spec.patience:
            factor = max(factor * spec.factor, spec.min_lr_rate)
            pause, bad = spec.cooldown, 0
            if factor <= spec.min_lr_rate:
                left -= 1
                if left <= 0:
                    factor, best, left = 1.0, math.inf, spec.reset_after
    return factor


def _improved(score: float, best: float, threshold: float) -> bool:
    """torch's relative threshold; scores of metrics for which higher is better are negative."""
    return score < best - threshold * abs(best) if math.isfinite(best) else score < best
