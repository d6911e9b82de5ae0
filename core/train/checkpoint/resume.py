"""Going on from the furthest checkpoint of a run, or from the checkpoint of another job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from core.base.files import sha256
from core.errors import SpecError
from core.plan.drift import Result, worst
from core.spec.run.manifest import MANIFEST
from core.spec.run.orders import ResumePoint
from core.train.checkpoint import engine_state, store
from core.train.data.loaders import StepLoader
from core.train.engine import Engine
from core.train.model.record import Environment
from core.train.run import Run
from core.train.state import TrainerState

CURSOR = "cursor"
"""The name under which the engine has the loader."""


def resume(
    run: Run, engine: Engine, loader: StepLoader, state: TrainerState, environment: Environment, total_steps: int
) -> None:
    """Load the furthest checkpoint that is whole, of this attempt or of those before, else the one that the job begins
    with. Rank 0 looks for all ranks. SpecError where it belongs to another run, or leaves this job nothing to do."""
    found = _furthest(run) if run.ranks.first else None
    path = run.ranks.broadcast("" if found is None else str(found))
    point = None if path else run.order.resume_point
    if point is not None:
        path = point.folder
        if run.ranks.first:
            _require_whole(point)
    if not path:
        return
    rows = point is None or point.same_rows
    try:
        engine_state.load(engine, Path(path), without=() if rows else (CURSOR,))
    except ValueError as error:
        raise SpecError(f"{Path(path).name} belongs to another run: {error}", code="checkpoint_mismatch") from error
    step, before = engine.steps, engine.micro_steps
    micro = loader.translate(step, before) if rows else None
    if micro is None:  # other rows, or it lies between two batches of ours: the step begins anew, with all of its rows
        engine.zero_grad()
        state.drop_window()
    else:
        engine.micro_steps = micro
    if point is not None:
        _require_steps_left(point, step, total_steps)
        if not point.same_evaluations:
            state.evaluations.clear()
            state.samples.clear()
    drifted = environment.drift(() if point is None else _of_changed(point))
    if refused := [one for one in drifted if one.rule.verdict == "refuse"]:
        words = "; ".join(f"{one.words} ({one.rule.why})" for one in refused)
        raise SpecError(
            f"{Path(path).name} cannot be resumed here: {words}; restore what it was made from, or start at step 0",
            code="drift_refused",
        )
    told = {"drift": [one.as_dict() for one in drifted], "result": worst(drifted)}
    run.events.write("resumed", step=step, micro_step=before, path=path, **told)
    if warned := [one for one in drifted if one.rule.verdict == "warn"]:
        effect = EFFECTS[worst(warned)]
        run.notice("drift", f"not where it was before ({'; '.join(one.words for one in warned)}): {effect}")


EFFECTS: Mapping[Result, str] = {
    "same": "the weights do not depend on it",
    "last bits": "the rest may differ in the last bits",
    "other": "the rest differs from that of an undisturbed run",
}


def _of_changed(point: ResumePoint) -> list[str]:
    """Entries of a checkpoint's state that follow from the fields that were changed."""
    found = [f"spec.{name}" for name in point.changed]
    found += ["data.train"] if not point.same_rows else []
    return found + (["data.eval"] if not point.same_evaluations else [])


def _require_steps_left(point: ResumePoint, steps: int, total_steps: int) -> None:
    if steps >= total_steps:
        words = f"the checkpoint of `{point.job}` is after step {steps}, and this job has {total_steps}"
        raise SpecError(
            f"{words}: raise training.max_steps, or name an earlier checkpoint",
            field="checkpoint.resume_from",
            code="checkpoint_too_far",
        )


def _require_whole(point: ResumePoint) -> None:
    """A job never begins with another checkpoint than the one that was named."""
    folder = Path(point.folder)
    if not (folder / MANIFEST).is_file():
        wrong: str | None = "it is gone"
    elif sha256(folder / MANIFEST) != point.sha256:
        wrong = "its manifest has changed"
    else:
        wrong = store.fault(folder)
    if wrong is not None:
        raise SpecError(
            f"the checkpoint {folder.name} of `{point.job}` cannot be used ({wrong}): name another "
            f"(`eft checkpoints list {point.job}`)",
            field="checkpoint.resume_from",
            code="checkpoint_gone",
        )


def _furthest(run: Run) -> Path | None:
    """The furthest checkpoint that is whole. Damaged ones that are further are put aside."""
    for found in store.newest_first(run.checkpoint_folders):
        wrong = store.fault(found.path)
        if wrong is None:
            return found.path
        kept = store.quarantine(found.path)
        run.notice(
            "bad_checkpoint", f"{found.path.name} is damaged ({wrong}); kept as {kept.name}, the one before it is tried"
        )
    return None
