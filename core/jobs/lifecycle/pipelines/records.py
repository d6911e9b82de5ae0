"""Rows of pipelines: find them, tell what happens to them, end them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Job, Pipeline, PipelineEvent, PipelineStep
from core.errors import NotFound
from core.jobs.base import deliveries
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.base.states import Status
from core.jobs.base.transitions import Actor

PREFIX = "pipe-"


class PipelineStatus(StrEnum):
    RUNNING = "running"
    """One of its jobs is under way, or waits to be submitted."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class PipelineHead:
    """How far a pipeline is: what a watcher must know to see whether there is news."""

    status: Status
    """Its status is named as that of a job is."""
    event_seq: int


def find(session: Session, actor: Actor, pipeline_id: str, *, lock: bool = False) -> Pipeline:
    """Get a pipeline of the actor's project. Raises NotFound if it is missing or another project's."""
    query = select(Pipeline).where(Pipeline.id == pipeline_id, Pipeline.project_id == actor.project_id)
    row = session.execute(query.with_for_update() if lock else query).scalar_one_or_none()
    if row is None:
        raise NotFound(f"there is no pipeline `{pipeline_id[:60]}` in this project", field="pipeline_id")
    return row


def page(
    session: Session,
    project_id: str,
    *,
    status: PipelineStatus | None = None,
    after: str | None = None,
    limit: int = 20,
) -> ResultPage[Pipeline]:
    """Pipelines of a project, newest first. Raises UnknownCursor when `after` is none of them."""
    query = select(Pipeline).where(Pipeline.project_id == project_id)
    if after is not None:
        known = select(Pipeline.id).where(Pipeline.id == after, Pipeline.project_id == project_id)
        if session.execute(known).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a pipeline in this project", field="after")
        query = query.where(Pipeline.id < after)
    if status is not None:
        query = query.where(Pipeline.status == status.value)
    rows = session.execute(query.order_by(Pipeline.id.desc()).limit(limit + 1)).scalars().all()
    return ResultPage(rows[:limit], len(rows) > limit)


def steps_of(session: Session, pipeline_ids: Sequence[str]) -> dict[str, list[PipelineStep]]:
    """The steps of each, in their order."""
    found: dict[str, list[PipelineStep]] = {one: [] for one in pipeline_ids}
    query = select(PipelineStep).where(PipelineStep.pipeline_id.in_(pipeline_ids))
    for step in session.execute(query.order_by(PipelineStep.pipeline_id, PipelineStep.number)).scalars():
        found[step.pipeline_id].append(step)
    return found


def jobs_of(session: Session, steps: Sequence[PipelineStep]) -> dict[str, Job]:
    """The jobs of steps, as far as they are there."""
    wanted = [step.job_id for step in steps if step.job_id is not None]
    return {job.id: job for job in session.execute(select(Job).where(Job.id.in_(wanted))).scalars()}


def events_after(session: Session, pipeline_id: str, after: int, limit: int) -> Sequence[PipelineEvent]:
    query = select(PipelineEvent).where(PipelineEvent.pipeline_id == pipeline_id, PipelineEvent.seq > after)
    return session.execute(query.order_by(PipelineEvent.seq).limit(limit)).scalars().all()


def heads(session: Session, ids: Sequence[str]) -> dict[str, PipelineHead]:
    """Status and newest event of those among `ids` that are pipelines."""
    wanted = [one for one in ids if one.startswith(PREFIX)]
    found: dict[str, PipelineHead] = {}
    for start in range(0, len(wanted), 500):  # SQLite has a limit of parameters
        some = Pipeline.id.in_(wanted[start : start + 500])
        rows = session.execute(select(Pipeline.id, Pipeline.status, Pipeline.event_seq).where(some))
        found.update({row.id: PipelineHead(Status(row.status), row.event_seq) for row in rows})
    return found


def tell(session: Session, pipeline: Pipeline, kind: str, data: Mapping[str, Any], **changes: Any) -> None:
    """Add an event, and write `changes` of the row with it. The caller holds the row's lock."""
    seq = session.execute(
        update(Pipeline)
        .where(Pipeline.id == pipeline.id)
        .values(event_seq=Pipeline.event_seq + 1, **changes)
        .returning(Pipeline.event_seq)
        .execution_options(synchronize_session=False)
    ).scalar_one()
    session.execute(
        insert(PipelineEvent).values(
            pipeline_id=pipeline.id,
            owner_id=pipeline.owner_id,
            project_id=pipeline.project_id,
            seq=seq,
            type=kind,
            data=dict(data),
        )
    )
    session.expire(pipeline)


def end(
    session: Session, pipeline: Pipeline, status: PipelineStatus, reason: str, data: Mapping[str, Any] | None = None
) -> None:
    """Its final status, with an event and the notices. The caller holds the row's lock."""
    told = {"from": pipeline.status, "to": status.value, "reason": reason, **(data or {})}
    tell(session, pipeline, "status", told, status=status.value, reason=reason, finished_at=db_now())
    steps = steps_of(session, [pipeline.id])[pipeline.id]
    about = {
        "id": pipeline.id,
        "name": pipeline.name,
        "project_id": pipeline.project_id,
        "status": status.value,
        "reason": reason,
        "steps": [{"name": step.name, "job_id": step.job_id} for step in steps],
        "created_at": pipeline.created_at,
        "finished_at": pipeline.finished_at,
    }
    kind = f"pipeline.{status.value}"
    deliveries.tell_end(session, pipeline.owner_id, pipeline.project_id, kind, about, pipeline.notify)
