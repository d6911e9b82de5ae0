"""The weights of the best evaluation, back into the model once training is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from core.spec.axes.runtime import HeldOut, NoEvaluation
from core.spec.run.checkpoint_names import best_name
from core.train.base.events import EventWriter
from core.train.checkpoint import store
from core.train.early_stopping import judge
from core.train.engine import Engine


def hand_back_best(
    engine: Engine,
    evaluations: Sequence[Mapping[str, float]],
    spec: HeldOut | NoEvaluation,
    roots: Sequence[Path],
    events: EventWriter,
) -> dict[str, Any] | None:
    """Load them, if that is wanted and they are not those of the last step. Part of the job's result: {"step",
    "metric", "value", "restored": the weights handed back are those of that step}; None without evaluations.

    `roots` are the folders of checkpoints of this attempt and of earlier ones. Weights that are gone or damaged are
    told in a notice; what is handed back then are those of the last step.
    """
    best = judge(evaluations, spec).best
    if best is None or isinstance(spec, NoEvaluation):
        return None
    step, metric = int(best["step"]), spec.metric_for_best_model
    found = {"step": step, "metric": metric, "value": best[metric], "restored": step == engine.steps}
    if not spec.load_best_model_at_end or step == engine.steps:
        return found
    wrong = "it is gone"
    for root in roots:
        folder = root / best_name(step)
        if not folder.is_dir():
            continue
        if (fault := store.fault(folder)) is None:
            engine.load_weights(folder)
            words = f"the weights handed back are those after step {step}, the best by {metric}"
            if step == 0:
                words += ": nothing that was trained is better than the untrained model"
            events.write("notice", code="best_restored", message=words)
            return found | {"restored": True}
        wrong = fault
    words = f"the weights after step {step}, the best by {metric}, cannot be read ({wrong})"
    events.write("notice", code="best_missing", message=f"{words}; those of the last step are handed back")
    return found
