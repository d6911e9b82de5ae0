"""The next step of a pipeline: submitted by the service itself, exactly once.

A pipeline moves under the lock of its row: what became of the current step is read, its gates are held against its
result, and the next job is inserted together with its id in the step, all in one transaction. A process that is killed
leaves nothing behind or all of it, and of two that look at once the second one sees what the first one has done.
"""

from __future__ import annotations

import logging

from sqlalchemy import select, update
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.orm import Session

from core.db.engine import Database
from core.db.tables import File, Job, Membership, Pipeline, PipelineStep, User
from core.errors import EftError, SpecError
from core.jobs.admission import parents
from core.jobs.base.figures import figure
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.pipelines import records
from core.jobs.lifecycle.pipelines.records import PipelineStatus
from core.jobs.lifecycle.submit import submit
from core.jobs.policies import audit, quotas
from core.jobs.policies.volume import NO_BOUNDS, QueueFull, SpecsFull, VolumeLimits
from core.plan import compatibility
from core.spec.axes.data import FileSource, singles
from core.spec.axes.model import JobModel, Model
from core.spec.axes.rollout.models import with_models
from core.spec.job import JobSpec
from core.spec.pipeline import Gate, step_of
from core.spec.resolve import resolve

log = logging.getLogger("eft.pipelines")

SUBMITTERS = ("member", "admin")
"""Roles whose users may submit jobs (api/auth/policy.py)."""
_ENDED = [status.value for status in FINAL]


def due(session: Session) -> list[str]:
    """List running pipelines without a job under way, oldest first."""
    under_way = (
        select(PipelineStep.pipeline_id)
        .join(Job, Job.id == PipelineStep.job_id)
        .where(PipelineStep.pipeline_id == Pipeline.id, Job.status.not_in(_ENDED))
    )
    query = select(Pipeline.id).where(Pipeline.status == PipelineStatus.RUNNING.value, ~under_way.exists())
    return list(session.execute(query.order_by(Pipeline.id)).scalars())


def advance(database: Database, pipeline_id: str, bounds: VolumeLimits = NO_BOUNDS) -> bool:
    """Do what follows from the end of the current step: submit the next one, or end the pipeline. False: nothing
    follows now. A step that the queue has no room for stays due; one that can never be submitted ends the pipeline."""
    try:
        with database.write() as session:
            pipeline = _locked(session, pipeline_id)
            return pipeline is not None and _advance(session, pipeline, bounds)
    except (QueueFull, SpecsFull) as error:
        return _explain(database, pipeline_id, f"the next step cannot be submitted yet: {error.message}")
    except EftError as error:
        return _fail(database, pipeline_id, f"its next step cannot be submitted: {error.message}")
    except (OperationalError, InterfaceError):
        raise
    except Exception:
        log.exception("pipeline %s", pipeline_id)
        return _fail(database, pipeline_id, "its next step cannot be submitted because of a defect of eft; see the log")


def _locked(session: Session, pipeline_id: str) -> Pipeline | None:
    running = (Pipeline.id == pipeline_id, Pipeline.status == PipelineStatus.RUNNING.value)
    return session.execute(select(Pipeline).where(*running).with_for_update()).scalar_one_or_none()


def _advance(session: Session, pipeline: Pipeline, bounds: VolumeLimits) -> bool:
    steps = records.steps_of(session, [pipeline.id])[pipeline.id]
    begun = [step for step in steps if step.job_id is not None]
    if not begun:
        submit_step(session, pipeline, steps, 0, bounds)
        return True
    last = begun[-1]
    job = session.get(Job, last.job_id)
    if job is None:
        records.end(session, pipeline, PipelineStatus.FAILED, f"the job of its step `{last.name}` was deleted")
        return True
    match Status(job.status):
        case Status.SUCCEEDED:
            if not _passes(session, pipeline, last, job):
                return True
            if last is steps[-1]:
                records.end(session, pipeline, PipelineStatus.SUCCEEDED, "all steps have succeeded")
            else:
                submit_step(session, pipeline, steps, last.number + 1, bounds)
            return True
        case Status.FAILED:
            words = f"its step `{last.name}` failed: {job.reason}"
            records.end(session, pipeline, PipelineStatus.FAILED, words, {"step": last.name, "job": job.id})
            return True
        case Status.CANCELLED:
            words = f"its step `{last.name}` was cancelled"
            records.end(session, pipeline, PipelineStatus.CANCELLED, words, {"step": last.name, "job": job.id})
            return True
        case _:
            return False


def _passes(session: Session, pipeline: Pipeline, step: PipelineStep, job: Job) -> bool:
    """Hold the gates of a step against its result. False: one failed, and the pipeline has ended."""
    if step.passed is not None:  # taken over from the pipeline that this one tries again
        return True
    held, failed = [], []
    for one in step.gates:
        gate = Gate.model_validate(one)
        value = figure(job.result or {}, gate.metric)
        held.append({**gate.model_dump(mode="json"), "value": value, "passed": gate.passes(value)})
        if not gate.passes(value):
            failed.append(_words(gate, value))
    session.execute(
        update(PipelineStep)
        .where(PipelineStep.pipeline_id == pipeline.id, PipelineStep.number == step.number)
        .values(passed=held)
        .execution_options(synchronize_session=False)
    )
    if not failed:
        return True
    words = f"step `{step.name}` did not pass its gate: {'; '.join(failed)}"
    records.end(session, pipeline, PipelineStatus.FAILED, words, {"step": step.name, "job": job.id, "gates": held})
    return False


def _words(gate: Gate, value: float | None) -> str:
    if value is None:
        return f"the result has no {gate.metric}"
    bounds = [f"at least {gate.min:g}"] if gate.min is not None else []
    bounds += [f"at most {gate.max:g}"] if gate.max is not None else []
    return f"{gate.metric} is {value:g}, and must be {' and '.join(bounds)}"


def submit_step(
    session: Session, pipeline: Pipeline, steps: list[PipelineStep], number: int, bounds: VolumeLimits
) -> Job:
    """Submit the job of a step and write its id down, in the caller's transaction, which holds the pipeline's lock.

    Raises EftError where it cannot be submitted now (QueueFull, SpecsFull) or at all.
    """
    step = steps[number]
    actor = Actor(pipeline.owner_id, pipeline.project_id, pipeline.request_id)
    _require_submitter(session, actor)
    again = None if step.retries is None else session.get(Job, step.retries)
    spec = _settled(session, pipeline, steps, step) if again is None else JobSpec.model_validate(again.spec)
    _require_files(session, pipeline.project_id, spec)
    job = submit(session, actor, spec, retry_of=again, pipeline_id=pipeline.id, bounds=bounds)
    session.execute(
        update(PipelineStep)
        .where(PipelineStep.pipeline_id == pipeline.id, PipelineStep.number == number, PipelineStep.job_id.is_(None))
        .values(job_id=job.id)
        .execution_options(synchronize_session=False)
    )
    told = {"step": step.name, "number": number, "job": job.id}
    records.tell(session, pipeline, "step", told, reason=f"step {number + 1} of {len(steps)}, `{step.name}`")
    return job


def _settled(session: Session, pipeline: Pipeline, steps: list[PipelineStep], step: PipelineStep) -> JobSpec:
    """The job of a step, with the jobs of the steps whose models it names in the place of what stood for them."""
    spec = JobSpec.model_validate(step.spec)

    def made(model: Model, field: str) -> Model:
        if not isinstance(model, JobModel) or (number := step_of(model.id)) is None:
            return model
        if (job_id := steps[number].job_id) is None:
            raise SpecError(f"step `{steps[number].name}` has no job", code="unknown_step", field=field)
        return model.model_copy(update={"id": job_id})

    spec = spec.model_copy(update={"model": made(spec.model, "model"), "stage": with_models(spec.stage, made)})
    spec = resolve(parents.settle(session, pipeline.project_id, spec))
    if refused := compatibility.check(spec):
        first = refused[0]
        raise SpecError(f"{first.field}: {first.message}", field=first.field, faults=refused, code=first.code)
    most = quotas.max_priority(session, pipeline.project_id)  # it may have been lowered since
    return spec if spec.priority <= most else spec.model_copy(update={"priority": most})


def _require_submitter(session: Session, actor: Actor) -> None:
    """The service submits in the name of the owner, who may have lost the right since."""
    query = (
        select(User.id)
        .join(Membership, Membership.user_id == User.id)
        .where(
            User.id == actor.user_id,
            User.disabled_at.is_(None),
            Membership.project_id == actor.project_id,
            Membership.role.in_(SUBMITTERS),
        )
    )
    if session.execute(query).one_or_none() is None:
        raise SpecError(
            "its owner may no longer submit jobs in this project; a member who may can retry it",
            code="owner_may_not_submit",
        )


def _require_files(session: Session, project_id: str, spec: JobSpec) -> None:
    sources = singles(spec.data.train, "data.train")
    sources += singles(spec.data.eval, "data.eval") if spec.data.eval is not None else []
    for field, source in sources:
        if not isinstance(source, FileSource):
            continue
        query = select(File.id).where(File.id == source.id, File.project_id == project_id)
        if session.execute(query.with_for_update(read=True)).one_or_none() is None:
            raise SpecError(f"`{source.id}` was deleted", field=field, code="file_not_found")


def _explain(database: Database, pipeline_id: str, words: str) -> bool:
    with database.write() as session:
        pipeline = _locked(session, pipeline_id)
        if pipeline is not None and pipeline.reason != words:
            records.tell(session, pipeline, "waiting", {"reason": words}, reason=words)
    return False


def _fail(database: Database, pipeline_id: str, words: str) -> bool:
    with database.write() as session:
        pipeline = _locked(session, pipeline_id)
        if pipeline is None:
            return False
        records.end(session, pipeline, PipelineStatus.FAILED, words)
        audit.record(session, None, "pipeline.fail", pipeline_id, {"why": words}, project_id=pipeline.project_id)
    return True
