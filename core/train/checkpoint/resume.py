"""Going on from the furthest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from core.errors import SpecError
from core.train.checkpoint import store
from core.train.data.loaders import StepLoader
from core.train.engine import Engine
from core.train.model.record import Environment
from core.train.run import Run
from core.train.state import TrainerState


def resume(run: Run, engine: Engine, loader: StepLoader, state: TrainerState, environment: Environment) -> None:
    """Load the furthest checkpoint that is whole, of this attempt or of those before. Rank 0 looks for all ranks.
    SpecError where it belongs to another run."""
    found = _furthest(run) if run.ranks.first else None
    path = run.ranks.broadcast("" if found is None else str(found))
    if not path:
        return
    try:
        engine.load(Path(path))
    except ValueError as error:
        raise SpecError(f"{Path(path).name} belongs to another run: {error}", code="checkpoint_mismatch") from error
    step, before = engine.steps, engine.micro_steps
    micro = loader.translate(step, before)
    if micro is None:  # it lies between two batches of ours: the step begins anew, with all of its rows
        engine.zero_grad()
        state.drop_window()
    else:
        engine.micro_steps = micro
    run.events.write("resumed", step=step, micro_step=before, path=path)
    if drift := environment.drift():
        run.notice("drift", f"not where it was before ({'; '.join(drift)}): the rest may differ in the last bits")


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
