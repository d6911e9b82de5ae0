"""What waiting jobs say while the data root is full. It is one data root for all nodes, so one worker tells for all."""

from __future__ import annotations

from sqlalchemy import CursorResult, update
from sqlalchemy.orm import Session

from core.db.tables import Job
from core.jobs.states import Status

WAITS = "waits for room on the data root"


def words(free: int, needed: int) -> str:
    return f"{WAITS}: {free >> 20} MiB free, needs {needed >> 20}"


def missing(session: Session, free: int, needed: int) -> int:
    """Every waiting job that does not say so yet says that it waits for room. Returns how many.

    Their state does not change, so no event is written: with thousands waiting that would help to fill the disk.
    """
    return _say(session, ~Job.reason.startswith(WAITS), words(free, needed))


def back(session: Session) -> int:
    """There is room again."""
    return _say(session, Job.reason.startswith(WAITS), "waits for a slot")


def _say(session: Session, which: object, reason: str) -> int:
    done = session.execute(
        update(Job)
        .where(Job.status == Status.QUEUED.value, which)  # type: ignore[arg-type]
        .values(reason=reason)
        .execution_options(synchronize_session=False)
    )
    assert isinstance(done, CursorResult)
    return done.rowcount
