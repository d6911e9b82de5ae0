"""The weights of the best evaluation, back into the model once training is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from core.spec.axes.runtime import NoEvaluation
from core.spec.run.checkpoint_names import best_name
from core.train.checkpoint import engine_state, store
from core.train.engine import Engine
from core.train.evaluation.early_stopping import early_stopping
from core.train.run import Run
from core.train.stage import Stage


def load_best_model(
    run: Run, engine: Engine, stage: Stage, evaluations: Sequence[Mapping[str, float]]
) -> dict[str, Any] | None:
    """Load the best weights, if that is wanted and they are not those of the last step. Part of the job's result:
    {"step", "metric", "value", "restored": the exported weights are those of that step}; None without evaluations.

    A notice reports weights that are gone or damaged; those of the last step are exported then.
    """
    spec = run.evaluation
    best = early_stopping(evaluations, spec, stage).best
    if best is None or isinstance(spec, NoEvaluation):
        return None
    step, metric = int(best["step"]), spec.metric_for_best_model
    found = {"step": step, "metric": metric, "value": best[metric], "restored": step == engine.steps}
    if not spec.load_best_model_at_end or step == engine.steps:
        return found
    wrong = "it is gone"
    for root in run.best_folders:
        folder = root / best_name(step)
        if not folder.is_dir():
            continue
        if (fault := store.fault(folder)) is None:
            engine_state.load_weights(engine, folder)
            words = f"the exported weights are those after step {step}, the best by {metric}"
            if step == 0:
                words += ": nothing that was trained is better than the untrained model"
            run.notice("best_restored", words)
            return found | {"restored": True}
        wrong = fault
    words = f"the weights after step {step}, the best by {metric}, cannot be read ({wrong})"
    run.notice("best_missing", f"{words}; those of the last step are exported")
    return found
