"""From a request body to a pipeline: every step is checked as the job that it will be, before anything is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from api.jobs import plan
from api.jobs.service import Jobs
from api.notices import service as webhooks
from api.pipelines import schemas
from core.db.engine import Database
from core.db.tables import Pipeline
from core.errors import EftError, Fault, NotFound, SpecError
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.pipelines import records, wishes
from core.jobs.lifecycle.pipelines.wishes import PlannedStep
from core.jobs.policies import quotas
from core.jobs.policies.volume import VolumeLimits
from core.settings import Settings
from core.spec.axes.model import JobModel, Model
from core.spec.axes.runtime import HeldOut
from core.spec.job import JobSpec
from core.spec.pipeline import PipelineSpec, Step, job_document, parse_pipeline, stand_in
from core.storage.layout import Layout


class Pipelines:
    """Making pipelines in one installation."""

    def __init__(self, database: Database, settings: Settings, layout: Layout) -> None:
        self._database, self._settings, self._layout = database, settings, layout
        self._jobs = Jobs(database, settings, layout)

    def checked(self, actor: Actor, document: Any, *, unsent: bool = False) -> tuple[PipelineSpec, list[PlannedStep]]:
        """The pipeline with every job resolved. Raises SpecError, NotFound with fields such as
        `steps.1.job.method.r`; NoSpace."""
        spec = parse_pipeline(document)
        with self._database.read() as session:
            if strange := webhooks.unknown(session, actor, spec.notify):
                words = f"there is no webhook `{strange[0]}` in this project"
                raise SpecError(f"notify: {words}", field="notify", code="webhook_not_found")
        ahead: dict[str, JobSpec] = {}
        steps = []
        for number, step in enumerate(spec.steps):
            place = f"steps.{number}"
            try:
                job = self._jobs.resolved(actor, job_document(spec, number), ahead=ahead, unsent=unsent)
                with self._database.read() as session:
                    quotas.check_priority(session, actor.project_id, job.priority)
                    self._require_fit(session, actor, job, ahead)
            except EftError as error:
                if error.field is not None and error.field.startswith(place):
                    raise
                raise _at(f"{place}.job", error) from error
            _check_gates(step, job, place)
            ahead[stand_in(number)] = job
            gates = [gate.model_dump(mode="json") for gate in step.gates]
            steps.append(PlannedStep(step.name, job.model_dump(mode="json"), gates))
        if not unsent:
            self._layout.require_space(self._settings.min_free_bytes)
        return spec, steps

    def create(
        self, session: Session, actor: Actor, spec: PipelineSpec, steps: Sequence[PlannedStep]
    ) -> dict[str, Any]:
        bounds = VolumeLimits.of(self._settings)
        return self.view(session, wishes.create(session, actor, spec.name, spec.notify, steps, bounds=bounds))

    def retry(self, session: Session, actor: Actor, pipeline_id: str, start: str | None) -> dict[str, Any]:
        bounds = VolumeLimits.of(self._settings)
        return self.view(session, wishes.retry(session, actor, pipeline_id, start, bounds))

    def view(self, session: Session, pipeline: Pipeline) -> dict[str, Any]:
        steps = records.steps_of(session, [pipeline.id])[pipeline.id]
        session.refresh(pipeline)
        for step in steps:
            session.refresh(step)
        return schemas.pipeline_view(pipeline, steps, records.jobs_of(session, steps))

    def _require_fit(self, session: Session, actor: Actor, job: JobSpec, ahead: dict[str, JobSpec]) -> None:
        """A step that fits no slot is refused now: hours later is too late."""
        if not self._settings.memory_check:
            return
        base = job.model_copy(update={"model": _base(job.model, ahead)})
        if (refused := plan.refusal(session, actor.project_id, base)) is not None:
            raise refused


def _base(model: Model, ahead: dict[str, JobSpec]) -> Model:
    """The model at the beginning of the chain, whose shape all others have."""
    while isinstance(model, JobModel) and model.id in ahead:
        model = ahead[model.id].model
    return model


def _check_gates(step: Step, job: JobSpec, place: str) -> None:
    """Raises SpecError for a gate about a figure that the result of the step will not have."""
    held_out = isinstance(job.evaluation, HeldOut)
    known = job.result_metrics
    for number, gate in enumerate(step.gates):
        if gate.metric in known:
            continue
        field = f"{place}.gates.{number}.metric"
        words = f"the result of this step has no `{gate.metric}`; it has {', '.join(f'`{name}`' for name in known)}"
        words += "" if held_out else ", and held-out figures with `data.eval` or `data.split`"
        raise SpecError(f"{field}: {words}", field=field, code="gate_without_figure")


def _at(place: str, error: EftError) -> EftError:
    """The same error, of one of several jobs."""
    field = f"{place}.{error.field}" if error.field else place
    faults = tuple(
        Fault(one.code, one.message, f"{place}.{one.field}" if one.field else place, one.line, one.times)
        for one in error.faults
    )
    text = error.message.removeprefix(f"{error.field}: ")
    if isinstance(error, NotFound):
        return NotFound(f"{field}: {text}", field=field, faults=faults, code=error.code)
    if isinstance(error, SpecError) or error.status in (400, 404, 422):
        return SpecError(f"{field}: {text}", field=field, faults=faults, code=error.code)
    return error
