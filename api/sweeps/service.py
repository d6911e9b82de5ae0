"""From a request body to a sweep: every run is checked as the job that it will be, before anything is stored."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from api.jobs import plan
from api.jobs.service import Jobs
from api.sweeps import schemas
from core.db.engine import Database
from core.db.tables import SweepRow
from core.errors import EftError, Fault, SpecError
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.sweeps import records, wishes
from core.jobs.policies import quotas
from core.jobs.policies.volume import VolumeLimits
from core.settings import Settings
from core.spec.axes.runtime import HeldOut
from core.spec.job import JobSpec
from core.spec.sweep import Sweep, job_at, parse_sweep, points
from core.storage.layout import Layout

Runs = list[tuple[dict[str, Any], JobSpec]]


class Sweeps:
    """Making sweeps in one installation."""

    def __init__(self, database: Database, settings: Settings, layout: Layout) -> None:
        self._database, self._settings, self._layout = database, settings, layout
        self._jobs = Jobs(database, settings, layout)

    def checked(self, actor: Actor, document: Any, *, unsent: bool = False) -> tuple[str | None, Sweep, Runs]:
        """Name, sweep and resolved runs. Raises SpecError with the run in its message; NoSpace."""
        sweep, job = parse_sweep(document)
        places = points(sweep)
        runs: Runs = []
        for number, point in enumerate(places, 1):
            name = str(job.get("name") or "sweep")[: 99 - len(str(len(places)))]
            try:
                spec = self._jobs.resolved(actor, job_at(job, point) | {"name": f"{name}-{number}"}, unsent=unsent)
                with self._database.read() as session:
                    quotas.check_priority(session, actor.project_id, spec.priority)
                    refused = plan.refusal(session, actor.project_id, spec) if self._settings.memory_check else None
                if refused is not None:
                    raise refused
            except EftError as error:
                told = ", ".join(f"{field}={value}" for field, value in point.items())
                error.message = f"run {number} of {len(places)} ({told}): {error.message}"
                if error.field in point:
                    error.field = f"sweep.{error.field}"
                raise
            runs.append((point, spec))
        sweep = _with_metric(sweep, [spec for _, spec in runs])
        if not unsent:
            self._layout.require_space(self._settings.min_free_bytes)
        return job.get("name"), sweep, runs

    def create(self, session: Session, actor: Actor, name: str | None, sweep: Sweep, runs: Runs) -> dict[str, Any]:
        bounds = VolumeLimits.of(self._settings)
        made = wishes.create(session, actor, name, sweep.model_dump(mode="json"), runs, bounds)
        return view(session, made)


def view(session: Session, sweep: SweepRow) -> dict[str, Any]:
    return schemas.sweep_view(sweep, records.runs_of(session, sweep.id))


def _with_metric(sweep: Sweep, specs: list[JobSpec]) -> Sweep:
    """The sweep with its metric written out. Raises SpecError for a figure that runs will not have, and for comparisons
    at steps at which they do not evaluate."""
    held_out = all(isinstance(spec.evaluation, HeldOut) for spec in specs)
    metric = sweep.metric or ("eval_loss" if held_out else "train_loss")
    for number, spec in enumerate(specs, 1):
        known = spec.result_metrics
        if metric not in known:
            words = f"the result of run {number} has no `{metric}`; it has {', '.join(f'`{name}`' for name in known)}"
            raise _refused("gate_without_figure", words, "sweep.metric")
        if sweep.halving is None:
            continue
        every = spec.evaluation.eval_steps if isinstance(spec.evaluation, HeldOut) else None
        if metric == "train_loss" or every is None or any(step % every for step in sweep.halving.steps):
            words = (
                "runs are compared by a held-out metric at steps at which they evaluate: give held-out rows, and set "
            )
            words += "`evaluation.eval_steps` to a number that divides each of these steps"
            raise _refused("invalid_value", words, "sweep.halving.steps")
        if spec.training.max_steps is not None and sweep.halving.steps[-1] >= spec.training.max_steps:
            words = f"run {number} ends at step {spec.training.max_steps}: compare runs before that"
            raise _refused("invalid_value", words, "sweep.halving.steps")
    return sweep.model_copy(update={"metric": metric})


def _refused(code: str, message: str, field: str) -> SpecError:
    fault = Fault(code, message, field)
    return SpecError(f"{field}: {message}", field=field, faults=(fault,), code=fault.code)
