"""What evaluations decide: which one was the best, and whether it is time to stop. Pure functions of the list of
evaluations, which is part of every checkpoint: a run that was killed decides as one that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.spec.axes.runtime import HeldOut, NoEarlyStopping, NoEvaluation, Patience
from core.train.stage import Stage


@dataclass(frozen=True, slots=True)
class EarlyStoppingState:
    best: Mapping[str, float] | None
    """The best evaluation, its `step` among its values; the first of equals. None before the first."""
    waited: int
    """Evaluations in a row that were no better than the best before them by more than min_delta."""
    stop: bool
    """The patience is used up."""


def early_stopping(
    evaluations: Iterable[Mapping[str, float]], spec: HeldOut | NoEvaluation, stage: Stage
) -> EarlyStoppingState:
    """Look at `evaluations` in the order of their steps; the one of the untrained model (step 0) counts."""
    if isinstance(spec, NoEvaluation):
        return EarlyStoppingState(None, 0, False)
    metric = spec.metric_for_best_model
    sign = 1.0 if spec.measured(stage.held_out_metrics)[metric] == "higher" else -1.0
    match spec.early_stopping:
        case NoEarlyStopping():
            patience, min_delta = None, 0.0
        case Patience(patience=patience, min_delta=min_delta):
            pass
    best: Mapping[str, float] | None = None
    mark, waited = -float("inf"), 0
    for values in evaluations:
        score = sign * values[metric]
        if best is None or score > sign * best[metric]:
            best = values
        if score > mark + min_delta:
            mark, waited = score, 0
        else:
            waited += 1
    return EarlyStoppingState(best, waited, patience is not None and waited >= patience)


def best_steps(evaluations: Iterable[Mapping[str, float]], spec: HeldOut | NoEvaluation, stage: Stage) -> list[int]:
    """The steps of the evaluations, from the best to the worst; of equals the first one comes first."""
    if isinstance(spec, NoEvaluation):
        return []
    metric = spec.metric_for_best_model
    sign = 1.0 if spec.measured(stage.held_out_metrics)[metric] == "lower" else -1.0
    return [int(values["step"]) for values in sorted(evaluations, key=lambda values: sign * values[metric])]


def worse(values: Mapping[str, float], bound: float, spec: HeldOut, stage: Stage) -> bool:
    """Whether an evaluation is worse than `bound` by the metric that decides which one is the best."""
    metric = spec.metric_for_best_model
    lower = spec.measured(stage.held_out_metrics)[metric] == "lower"
    return values[metric] > bound if lower else values[metric] < bound


def needed(
    evaluations: Sequence[Mapping[str, float]], spec: HeldOut, stage: Stage, checkpoints: Iterable[int]
) -> set[int]:
    """Find the steps whose weights must be kept: the best so far, and the best as a run would know it that goes on from
    one of `checkpoints` (their steps; one of step n may have been written before or after the evaluation of step n)."""
    views = [evaluations]
    for step in checkpoints:
        views.append([values for values in evaluations if values["step"] < step])
        views.append([values for values in evaluations if values["step"] <= step])
    states = (early_stopping(view, spec, stage) for view in views)
    return {int(state.best["step"]) for state in states if state.best is not None}
