"""Rows of sessions. Each is a job of kind `session`: it waits its turn, is claimed and is billed as a training is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.db.tables import Job, SessionRow
from core.errors import NotFound, SpecError
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.submit import stop, submit
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits
from core.spec.job import JobSpec
from core.spec.session.job import SessionSpec

KIND: Literal["session"] = "session"
VIEW = {
    Status.PAUSING: "parking",
    Status.PAUSED: "parked",
    Status.STOPPING: "closing",
    Status.CANCELLED: "closed",
}
"""What people read in place of a job's status, where that differs."""


STATUSES = tuple(VIEW.get(status, status.value) for status in Status if status is not Status.SUCCEEDED)
"""All words for the state of a session; none succeeds."""


@dataclass(frozen=True, slots=True)
class FoundSession:
    row: SessionRow
    job: Job

    @property
    def status(self) -> str:
        status = Status(self.job.status)
        return VIEW.get(status, status.value)


def create(
    session: Session, actor: Actor, spec: SessionSpec, job: JobSpec, *, bounds: VolumeLimits = NO_BOUNDS
) -> FoundSession:
    """Queue a session; `job` is its resolved and checked form. Raises QueueFull beyond `bounds`."""
    made = submit(session, actor, job, kind=KIND, bounds=bounds)
    row = SessionRow(id=made.id, owner_id=actor.user_id, project_id=actor.project_id, spec=spec.model_dump(mode="json"))
    session.add(row)
    session.flush()
    session.refresh(row)
    return FoundSession(row, made)


def find(session: Session, actor: Actor, session_id: str, *, lock: bool = False) -> FoundSession:
    """Get a session of the actor's project. Raises NotFound if it is missing or another project's."""
    query = (
        select(SessionRow, Job)
        .join(Job, Job.id == SessionRow.id)
        .where(
            SessionRow.id == session_id,
            SessionRow.project_id == actor.project_id,
        )
    )
    found = session.execute(query.with_for_update() if lock else query).one_or_none()
    if found is None:
        raise NotFound(f"there is no session `{session_id[:60]}` in this project", field="session_id")
    return FoundSession(*found)


def named(session: Session, actor: Actor, name: str) -> FoundSession | None:
    """The newest session of this name in the actor's project."""
    query = select(SessionRow, Job).join(Job, Job.id == SessionRow.id)
    query = query.where(SessionRow.project_id == actor.project_id, Job.name == name)
    row = session.execute(query.order_by(SessionRow.id.desc()).limit(1)).one_or_none()
    return None if row is None else FoundSession(*row)


def beginning(session: Session, actor: Actor, start: str) -> list[FoundSession]:
    """Sessions of the actor's project whose names begin so."""
    query = select(SessionRow, Job).join(Job, Job.id == SessionRow.id)
    query = query.where(SessionRow.project_id == actor.project_id, Job.name.startswith(start, autoescape=True))
    return [FoundSession(*row) for row in session.execute(query)]


def matching(
    session: Session, actor: Actor, pattern: str, *, offset: int, limit: int
) -> tuple[list[FoundSession], int]:
    """Sessions of the actor's project whose names are LIKE the pattern, newest first; and the number of all."""
    query = select(SessionRow, Job).join(Job, Job.id == SessionRow.id)
    query = query.where(SessionRow.project_id == actor.project_id, Job.name.like(pattern))
    count = session.execute(select(func.count()).select_from(query.subquery())).scalar_one()
    ordered = query.order_by(SessionRow.id.desc()).offset(offset).limit(limit)
    return [FoundSession(*row) for row in session.execute(ordered)], count


def statuses(words: Sequence[str]) -> list[Status]:
    """The states that these words name. Raises SpecError."""
    known = dict(zip(STATUSES, (status for status in Status if status is not Status.SUCCEEDED), strict=True))
    if (odd := next((word for word in words if word not in known), None)) is not None:
        shown = ", ".join(STATUSES)
        raise SpecError(
            f"`{odd[:30]}` is not a state of a session; there are {shown}", field="status", code="invalid_value"
        )
    return [known[word] for word in words]


def page(
    session: Session,
    actor: Actor,
    *,
    statuses: Sequence[Status] = (),
    mine: bool = False,
    after: str | None = None,
    limit: int = 20,
) -> ResultPage[FoundSession]:
    """Sessions of the actor's project, newest first; `mine`: only those that the actor has opened. Raises UnknownCursor
    when `after` is none of them."""
    query = select(SessionRow, Job).join(Job, Job.id == SessionRow.id)
    query = query.where(SessionRow.project_id == actor.project_id)
    if statuses:
        query = query.where(Job.status.in_([status.value for status in statuses]))
    if mine:
        query = query.where(Job.owner_id == actor.user_id)
    if after is not None:
        known = select(SessionRow.id).where(SessionRow.id == after, SessionRow.project_id == actor.project_id)
        if session.execute(known).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a session in this project", field="after")
        query = query.where(SessionRow.id < after)
    rows = [FoundSession(*row) for row in session.execute(query.order_by(SessionRow.id.desc()).limit(limit + 1))]
    return ResultPage(rows[:limit], len(rows) > limit)


def close(session: Session, actor: Actor, session_id: str) -> FoundSession:
    """End a session: at once while it waits or is parked, else its child is ended. Asking twice is fine; a session that
    has failed stays failed."""
    found = find(session, actor, session_id, lock=True)
    if Status(found.job.status) not in FINAL:
        stop(session, actor, found.job, why="closed by its owner")
        session.refresh(found.job)
    return found
