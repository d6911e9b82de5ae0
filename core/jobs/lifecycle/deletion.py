"""The end of a job's rows: what a person deletes, and previews whose time is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Text, case, cast, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.db.tables import (
    Allocation,
    Artifact,
    Attempt,
    Audit,
    DeletedJobs,
    Event,
    Job,
    JobDependency,
    Metric,
    OutboxMessage,
    Pipeline,
    PipelineStep,
    RegisteredModel,
    SweepRow,
)
from core.errors import Conflict, NotFound
from core.jobs.admission import dependencies, parents
from core.jobs.admission.rollouts import reward_models
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.registry import exports
from core.jobs.lifecycle.submit import find
from core.jobs.policies import audit, usage, volume
from core.spec.run.folder import ARTIFACTS, CHECKPOINTS
from core.storage.store import StoredObject

DELETED = "job.delete"
IN_USE = "job_in_use"
MODEL = "this job's model"
WAITS = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 3 * 24 * 3600)
"""Seconds: the buckets in which waits for the first start are counted. `deleted_jobs` has their places: only append."""


@dataclass(frozen=True, slots=True)
class Freed:
    """Bytes that go with a job's run folder."""

    checkpoints: int = 0
    artifacts: int = 0
    other: int = 0
    """Logs, events, and what the trainer wrote beside them."""

    @property
    def total(self) -> int:
        return self.checkpoints + self.artifacts + self.other

    @classmethod
    def of(cls, entries: Iterable[StoredObject]) -> Freed:
        """From what lies below `runs/JOB`."""
        found = {CHECKPOINTS: 0, ARTIFACTS: 0, "": 0}
        for entry in entries:
            part = (*entry.key.split("/"), "", "", "")[3]  # runs/JOB/attempt-N/PART
            found[part if part in found else ""] += entry.bytes
        return cls(found[CHECKPOINTS], found[ARTIFACTS], found[""])


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a job cannot be deleted now."""

    code: str
    by: str
    """Id of what needs the job: a job, export, model, pipeline or sweep; of the job itself where it has not ended."""
    words: str


def remove(session: Session, actor: Actor, job_id: str, freed: Freed, half_life: float) -> bool:
    """Delete an ended job's rows; its time stays in the books of usage. False: it was deleted before.

    Raises NotFound, and Conflict for a job that has not ended, or that another one may go on from.
    """
    job = require(session, actor, job_id, lock=True)
    if job is None:
        return False
    usage.charge_job(session, job_id, half_life)
    _count(session, job)
    session.execute(
        update(Job).where(Job.retry_of == job_id).values(retry_of=None).execution_options(synchronize_session=False)
    )
    told = {"name": job.name, "status": job.status, "bytes": freed.total}
    for export in exports.of_job(session, job):
        rows(session, export)
    rows(session, job)
    audit.record(session, actor, DELETED, job_id, told)
    return True


def require(session: Session, actor: Actor, job_id: str, *, lock: bool = False) -> Job | None:
    """The job, if it may be deleted; None: it was deleted before. Raises NotFound, and Conflict for the first of its
    `obstacles`."""
    job = look_up(session, actor, job_id, lock=lock)
    if job is not None and (obstacle := next(obstacles(session, job), None)) is not None:
        raise Conflict(obstacle.words, field="job_id", code=obstacle.code)
    return job


def look_up(session: Session, actor: Actor, job_id: str, *, lock: bool = False) -> Job | None:
    """The job; None: it was deleted before. Raises NotFound."""
    try:
        return find(session, actor, job_id, lock=lock)
    except NotFound:
        if _was_deleted(session, actor, job_id):
            return None
        raise


def obstacles(session: Session, job: Job) -> Iterator[Obstacle]:
    """Why the job cannot be deleted now: it has not ended, or something needs it."""
    if Status(job.status) not in FINAL:
        words = f"the job is {job.status}; only an ended job can be deleted: cancel it, or wait for its end"
        yield Obstacle("not_ended", job.id, words)
    for retry in _built_on(session, job):
        words = f"`{retry}` may continue from checkpoints of this job: delete `{retry}` first"
        yield Obstacle(IN_USE, retry, words)
    if (pipeline := running_pipeline(session, job)) is not None:
        words = f"the job is a step of `{pipeline}`, which is running: cancel the pipeline, or wait for its end"
        yield Obstacle(IN_USE, pipeline, words)
    if (sweep := _run_of(session, job)) is not None:
        words = f"the job is a run of `{sweep}`, which is running: cancel the sweep, or wait for its end"
        yield Obstacle(IN_USE, sweep, words)
    for waiting in dependencies.waits_for(session, job.id):
        words = f"`{waiting}` waits for this job: it can be deleted once `{waiting}` has started or was cancelled"
        yield Obstacle(IN_USE, waiting, words)
    if (scored := reward_models.needed_by(session, job)) is not None:
        yield Obstacle(IN_USE, scored, reward_models.words_of_use(scored, MODEL))
    for child in parents.built_on(session, job):
        yield Obstacle(IN_USE, child, parents.words_of_use(child, MODEL))


def wait_bucket() -> ColumnElement[Any]:
    """The place in WAITS of a job's wait, in a query of jobs; null: it never started."""
    wait = Job.started_at - Job.created_at
    places = ((wait <= bound, place) for place, bound in enumerate(WAITS))
    return case(*places, (wait.is_(None), None), else_=len(WAITS))


def _count(session: Session, job: Job) -> None:
    bucket = session.execute(select(func.coalesce(wait_bucket(), -1)).where(Job.id == job.id)).scalar_one()
    waited = 0.0 if job.started_at is None else job.started_at - job.created_at
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    row = {"project_id": job.project_id, "status": job.status, "bucket": bucket, "jobs": 1, "waited": waited}
    statement = dialect.insert(DeletedJobs).values(**row)
    more = {"jobs": DeletedJobs.jobs + 1, "waited": DeletedJobs.waited + waited}
    keys = ["project_id", "status", "bucket"]
    session.execute(statement.on_conflict_do_update(index_elements=keys, set_=more))


def rows(session: Session, job: Job) -> None:
    """Delete a job with everything that tells of it alone. The caller holds its lock and knows that it may go."""
    for table in (Event, Metric, Artifact, Allocation, Attempt, OutboxMessage, RegisteredModel, JobDependency):
        session.execute(delete(table).where(table.job_id == job.id))
    session.execute(delete(JobDependency).where(JobDependency.after_id == job.id))
    volume.drop(session, job.project_id, job.spec)
    session.execute(delete(Job).where(Job.id == job.id).execution_options(synchronize_session=False))


def _was_deleted(session: Session, actor: Actor, job_id: str) -> bool:
    query = select(Audit.id).where(
        Audit.target == job_id, Audit.project_id == actor.project_id, Audit.action == DELETED
    )
    return session.execute(query.limit(1)).first() is not None


def _built_on(session: Session, job: Job) -> Sequence[str]:
    """Jobs that continue from this job's checkpoints, or would if they were tried again, newest first."""
    query = select(Job.id).where(
        Job.project_id == job.project_id,
        Job.status != Status.SUCCEEDED.value,
        cast(Job.resume_from, Text).contains(job.id),
    )
    return session.execute(query.order_by(Job.id.desc())).scalars().all()


def _run_of(session: Session, job: Job) -> str | None:
    """A running sweep whose other runs this one is compared with."""
    if job.sweep_id is None:
        return None
    query = select(SweepRow.id).where(SweepRow.id == job.sweep_id, SweepRow.status == "running")
    return session.execute(query).scalar_one_or_none()


def running_pipeline(session: Session, job: Job) -> str | None:
    """A running pipeline that goes on from this job, or may."""
    query = (
        select(Pipeline.id)
        .join(PipelineStep, PipelineStep.pipeline_id == Pipeline.id)
        .where(PipelineStep.job_id == job.id, Pipeline.status == "running")
    )
    return session.execute(query.limit(1)).scalar_one_or_none()


def jobs_using_file(session: Session, project_id: str, file_id: str, limit: int = 10) -> Sequence[str]:
    """Jobs that are not over yet and train or evaluate on the file, and running pipelines with a step that will."""
    found = list(
        session.execute(
            select(Job.id)
            .where(
                Job.project_id == project_id,
                Job.status.not_in([status.value for status in FINAL]),
                # Anywhere among the sources, however they are nested; an id is too long to stand there by chance.
                cast(Job.spec["data"], Text).contains(file_id),
            )
            .limit(limit)
        )
        .scalars()
        .all()
    )
    steps = (
        select(PipelineStep.pipeline_id)
        .join(Pipeline, Pipeline.id == PipelineStep.pipeline_id)
        .where(
            Pipeline.project_id == project_id,
            Pipeline.status == "running",
            PipelineStep.job_id.is_(None),
            cast(PipelineStep.spec["data"], Text).contains(file_id),
        )
        .distinct()
        .limit(limit)
    )
    return [*found, *session.execute(steps).scalars()][:limit]
