"""Birth of a job, and a user's wish to stop it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from core.db.tables import Event, Job
from core.errors import Conflict, NotFound
from core.ids import new_id
from core.jobs import outbox
from core.jobs.states import FINAL, Status
from core.jobs.transitions import move
from core.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks, for which project, in which request."""

    user_id: str
    project_id: str
    request_id: str | None = None


def submit(session: Session, actor: Actor, spec: JobSpec) -> Job:
    """Insert a resolved, checked spec as a queued job: row, event and doorbell in the caller's transaction."""
    job_id = new_id("job")
    session.add(
        Job(
            id=job_id,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            accelerator=spec.resources.accelerator,
            request_id=actor.request_id,
            status=Status.QUEUED.value,
            reason="waits for a worker to prepare its model",
            event_seq=1,
        )
    )
    session.flush()
    session.execute(
        insert(Event).values(
            job_id=job_id,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            seq=1,
            attempt=0,
            type="status",
            data={
                "from": None,
                "to": "queued",
                "reason": "submitted",
                "actor": actor.user_id,
                "request_id": actor.request_id,
            },
        )
    )
    outbox.ring(session, job_id)
    return session.execute(select(Job).where(Job.id == job_id).execution_options(populate_existing=True)).scalar_one()


def find(session: Session, actor: Actor, job_id: str, *, lock: bool = False) -> Job:
    """A job of the actor's project. Raises NotFound for anybody else's, as for one that does not exist."""
    query = select(Job).where(Job.id == job_id, Job.project_id == actor.project_id)
    job = session.execute(query.with_for_update() if lock else query).scalar_one_or_none()
    if job is None:
        raise NotFound(f"there is no job `{job_id[:60]}` in this project", field="job_id")
    return job


def cancel(session: Session, actor: Actor, job_id: str) -> Job:
    """Stop a job for good: at once while it waits, else its worker is told and ends the trainer.

    Asking twice is fine. Raises Conflict for a job that has succeeded or failed.
    """
    job = find(session, actor, job_id, lock=True)
    status = Status(job.status)
    who = {"actor": actor.user_id, "request_id": actor.request_id}
    if status in (Status.CANCELLED, Status.STOPPING):
        return job
    if status in FINAL:
        raise Conflict(f"the job has already {status.value}; there is nothing to cancel", code="already_final")
    if status is Status.QUEUED:
        move(session, job, Status.CANCELLED, reason="cancelled by its owner", data=who)
    else:
        move(
            session,
            job,
            Status.STOPPING,
            reason="cancelled by its owner",
            data=who,
            values={"stop_requested": "cancel"},
        )
    session.refresh(job)
    return job
