"""What people ask of pipelines: make one, cancel it, try it again, delete it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from core.db.tables import Job, Pipeline, PipelineEvent, PipelineStep
from core.errors import Conflict, NotFound
from core.ids import new_id
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import submit as jobs
from core.jobs.lifecycle.pipelines import records
from core.jobs.lifecycle.pipelines.advance import submit_step
from core.jobs.lifecycle.pipelines.records import PipelineStatus
from core.jobs.policies import audit, volume
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits

SETTLED = (PipelineStatus.FAILED, PipelineStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of a pipeline that is to be made."""

    name: str
    spec: dict[str, Any]
    gates: list[dict[str, Any]]
    job_id: str | None = None
    """The job of an earlier pipeline whose result is taken over."""
    passed: list[Any] | None = None
    retries: str | None = None
    """The failed job from whose checkpoints it goes on."""


def create(
    session: Session,
    actor: Actor,
    name: str | None,
    notify: Sequence[str],
    steps: Sequence[PlannedStep],
    *,
    retry_of: Pipeline | None = None,
    bounds: VolumeLimits = NO_BOUNDS,
) -> Pipeline:
    """Insert a pipeline of checked steps and submit the first that has no job yet, all in the caller's transaction.

    Raises EftError where that step cannot be submitted, QueueFull and SpecsFull beyond `bounds`.
    """
    pipeline_id = new_id("pipe")
    owned = {"owner_id": actor.user_id, "project_id": actor.project_id}
    values = {"name": name, "notify": list(notify), "request_id": actor.request_id}
    session.execute(
        insert(Pipeline).values(id=pipeline_id, **owned, **values, retry_of=None if retry_of is None else retry_of.id)
    )
    pipeline = session.execute(select(Pipeline).where(Pipeline.id == pipeline_id).with_for_update()).scalar_one()
    for number, step in enumerate(steps):
        row: dict[str, Any] = {"name": step.name, "spec": step.spec, "gates": step.gates}
        row |= {"job_id": step.job_id, "passed": step.passed, "retries": step.retries}
        session.execute(insert(PipelineStep).values(pipeline_id=pipeline_id, number=number, **owned, **row))
    told = {"from": None, "to": PipelineStatus.RUNNING.value, "actor": actor.user_id}
    records.tell(session, pipeline, "status", told | ({} if retry_of is None else {"retry_of": retry_of.id}))
    audit.record(session, actor, "pipeline.submit", pipeline_id, {"name": name, "steps": [one.name for one in steps]})
    first = next(number for number, step in enumerate(steps) if step.job_id is None)
    submit_step(session, pipeline, records.steps_of(session, [pipeline_id])[pipeline_id], first, bounds)
    for step in steps:  # behind the locks of jobs: the project's row comes last, as in every submit and deletion
        volume.add(session, actor.project_id, step.spec, bounds)
    return pipeline


def cancel(session: Session, actor: Actor, pipeline_id: str) -> Pipeline:
    """Submit no further step and cancel the job that is under way. Asking twice is fine. Raises Conflict for a pipeline
    that has succeeded or failed."""
    pipeline = records.find(session, actor, pipeline_id, lock=True)
    match PipelineStatus(pipeline.status):
        case PipelineStatus.CANCELLED:
            return pipeline
        case PipelineStatus.SUCCEEDED | PipelineStatus.FAILED:
            words = f"the pipeline has already {pipeline.status}; there is nothing to cancel"
            raise Conflict(words, code="already_final")
        case PipelineStatus.RUNNING:
            pass
    steps = records.steps_of(session, [pipeline_id])[pipeline_id]
    for job in records.jobs_of(session, steps).values():
        if Status(job.status) not in FINAL:
            try:
                jobs.cancel(session, actor, job.id)
            except Conflict:  # it has come to its end meanwhile
                continue
    whose = "its owner" if actor.user_id == pipeline.owner_id else "somebody of the project"
    records.end(session, pipeline, PipelineStatus.CANCELLED, f"cancelled by {whose}", {"actor": actor.user_id})
    audit.record(session, actor, "pipeline.cancel", pipeline_id, {})
    return pipeline


def retry(
    session: Session, actor: Actor, pipeline_id: str, start: str | None = None, bounds: VolumeLimits = NO_BOUNDS
) -> Pipeline:
    """A new pipeline with the steps of one that failed or was cancelled, which takes over the jobs before `start`.

    Without `start` it begins where the old one ended, and a failed job goes on from its checkpoints. A step that is
    named begins again, and the gates before it count as passed. Asked again while the new one has not failed too, it
    answers the same. Raises Conflict for a pipeline in another state, and where a job before `start` has not succeeded
    or is gone; NotFound for a step that it does not have.
    """
    old = records.find(session, actor, pipeline_id, lock=True)
    if PipelineStatus(old.status) not in SETTLED:
        words = f"the pipeline is {old.status}; only a failed or cancelled one can be retried"
        raise Conflict(words, code="not_ended")
    query = select(Pipeline).where(Pipeline.retry_of == pipeline_id, Pipeline.status.not_in(SETTLED))
    going = session.execute(query.limit(1)).scalar_one_or_none()
    if going is not None:
        return going
    steps = records.steps_of(session, [pipeline_id])[pipeline_id]
    done = records.jobs_of(session, steps)

    def has_succeeded(step: PipelineStep) -> bool:
        return step.job_id in done and done[step.job_id].status == Status.SUCCEEDED.value

    def has_passed(step: PipelineStep) -> bool:
        return has_succeeded(step) and all(one["passed"] for one in step.passed or ())

    if start is None:
        first = next((step.number for step in steps if not has_passed(step)), len(steps) - 1)
    else:
        named = [step.number for step in steps if step.name == start]
        if not named:
            words = ", ".join(f"`{step.name}`" for step in steps)
            raise NotFound(f"the pipeline has no step `{start[:50]}`; it has {words}", field="from")
        first = named[0]
    for step in steps[:first]:
        if not has_succeeded(step):
            words = f"step `{step.name}` has no job that has succeeded: start from it, or from an earlier step"
            raise Conflict(words, field="from", code="step_not_succeeded")
    planned = []
    for step in steps:
        kept = step.number < first
        ended = done.get(step.job_id) if step.job_id is not None and start is None and step.number == first else None
        goes_on = ended is not None and ended.status != Status.SUCCEEDED.value
        planned.append(
            PlannedStep(
                step.name,
                step.spec,
                step.gates,
                step.job_id if kept else None,
                (step.passed or []) if kept else None,
                ended.id if ended is not None and goes_on else None,
            )
        )
    return create(session, actor, old.name, old.notify, planned, retry_of=old, bounds=bounds)


def remove(session: Session, actor: Actor, pipeline_id: str) -> None:
    """Delete the rows of a pipeline that has ended; its jobs stay. Raises NotFound, Conflict."""
    pipeline = records.find(session, actor, pipeline_id, lock=True)
    if PipelineStatus(pipeline.status) is PipelineStatus.RUNNING:
        words = "the pipeline is running; only an ended pipeline can be deleted: cancel it, or wait for its end"
        raise Conflict(words, field="pipeline_id", code="not_ended")
    for step in records.steps_of(session, [pipeline_id])[pipeline_id]:
        volume.drop(session, actor.project_id, step.spec)
    told = {"name": pipeline.name, "status": pipeline.status}
    for loose in (
        update(Pipeline).where(Pipeline.retry_of == pipeline_id).values(retry_of=None),
        update(Job).where(Job.pipeline_id == pipeline_id).values(pipeline_id=None),
        delete(PipelineEvent).where(PipelineEvent.pipeline_id == pipeline_id),
        delete(PipelineStep).where(PipelineStep.pipeline_id == pipeline_id),
    ):
        session.execute(loose.execution_options(synchronize_session=False))
    session.execute(delete(Pipeline).where(Pipeline.id == pipeline_id).execution_options(synchronize_session=False))
    audit.record(session, actor, "pipeline.delete", pipeline_id, told)
