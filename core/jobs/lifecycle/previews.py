"""Previews: rows of `jobs` that render a file and train nothing. Claims, leases and events are those of any job; people
see them below their file, never among the jobs."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Select, or_, select
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Job
from core.errors import NotFound
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.submit import submit
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits
from core.spec.job import JobSpec

FRESH_SECONDS = 600
"""So long the same question has the same answer; a branch of a hub may have moved later."""
NEWEST = 50


def ask(session: Session, actor: Actor, spec: JobSpec, file_id: str, bounds: VolumeLimits = NO_BOUNDS) -> Job:
    """A preview of the file that `data.train` of a resolved spec names: a new one, or what was asked for just now.

    Raises QueueFull and SpecsFull beyond `bounds`.
    """
    plain = spec.model_copy(update={"name": None})
    document = plain.model_dump(mode="json")
    alive = or_(
        Job.status.not_in([status.value for status in FINAL]),
        (Job.status == Status.SUCCEEDED.value) & (Job.finished_at > db_now() - FRESH_SECONDS),
    )
    for known in session.execute(_of_file(actor, file_id).where(alive)).scalars():
        if known.spec == document:
            return known
    return submit(session, actor, plain, kind="preview", bounds=bounds)


def find(session: Session, actor: Actor, file_id: str, preview_id: str) -> Job:
    """Raises NotFound for anybody else's, and for one of another file, as for none."""
    row = session.execute(_of_file(actor, file_id).where(Job.id == preview_id)).scalar_one_or_none()
    if row is None:
        words = f"there is no preview `{preview_id[:60]}` of this file; `GET /files/{{id}}/previews` lists them"
        raise NotFound(words, field="preview_id")
    return row


def newest(session: Session, actor: Actor, file_id: str) -> Sequence[Job]:
    """The file's previews, newest first."""
    return session.execute(_of_file(actor, file_id)).scalars().all()


def _of_file(actor: Actor, file_id: str) -> Select[Job]:
    return (
        select(Job)
        .where(
            Job.project_id == actor.project_id,
            Job.kind == "preview",
            Job.spec["data"]["train"]["id"].as_string() == file_id,
        )
        .order_by(Job.id.desc())
        .limit(NEWEST)
    )
