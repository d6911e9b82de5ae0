"""Times that people give and read, and the bell for jobs that a change of them may let start."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import Job
from core.errors import EftError
from core.jobs.base import outbox
from core.jobs.base.states import Status


class BadTime(EftError):
    """A hold or a maintenance that would be over before it begins."""

    code = "bad_time"
    status = 422


def iso(time: float) -> str:
    """E.g. `2026-11-22T18:00:00Z`, as the audit has it."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def clock(time: float, moment: float) -> str:
    """`18:00 UTC`, with the date where that is not today."""
    then, today = datetime.fromtimestamp(time, UTC), datetime.fromtimestamp(moment, UTC).date()
    return f"{then:%H:%M} UTC" if then.date() == today else f"{then:%Y-%m-%d %H:%M} UTC"


def ring(session: Session) -> None:
    """Ring for the oldest waiting job: what kept it may be over."""
    waiting = session.execute(
        select(Job.id).where(Job.status == Status.QUEUED.value).order_by(Job.created_at, Job.id).limit(1)
    ).scalar_one_or_none()
    if waiting is not None:
        outbox.ring(session, waiting)
