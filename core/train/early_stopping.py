"""What evaluations decide: which one was the best, and whether it is time to stop. Pure functions of the list of
evaluations, which is part of every checkpoint: a run that was killed decides as one that nobody touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.spec.axes.runtime import BestMetric, HeldOut, NoEarlyStopping, NoEvaluation, Patience

GREATER_IS_BETTER: dict[BestMetric, bool] = {
    "eval_loss": False,
    "eval_perplexity": False,
    "eval_exact_match": True,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    best: Mapping[str, float] | None
    """The best evaluation, its `step` among its values; the first of equals. None before the first."""
    waited: int
    """Evaluations in a row that were no better than the best before them by more than min_delta."""
    stop: bool
    """The patience is used up."""


def judge(evaluations: Iterable[Mapping[str, float]], spec: HeldOut | NoEvaluation) -> Verdict:
    """`evaluations` in the order of their steps; the one of the untrained model (step 0) counts."""
    if isinstance(spec, NoEvaluation):
        return Verdict(None, 0, False)
    metric = spec.metric_for_best_model
    sign = 1.0 if GREATER_IS_BETTER[metric] else -1.0
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
    return Verdict(best, waited, patience is not None and waited >= patience)


def needed(evaluations: Sequence[Mapping[str, float]], spec: HeldOut, checkpoints: Iterable[int]) -> set[int]:
    """Steps whose weights must be kept: the best so far, and the best as runs would know it that go on from one of
    `checkpoints` (their steps; one of step n may have been written before or after the evaluation of step n)."""
    views = [evaluations]
    for step in checkpoints:
        views.append([values for values in evaluations if values["step"] < step])
        views.append([values for values in evaluations if values["step"] <= step])
    verdicts = (judge(view, spec) for view in views)
    return {int(verdict.best["step"]) for verdict in verdicts if verdict.best is not None}
