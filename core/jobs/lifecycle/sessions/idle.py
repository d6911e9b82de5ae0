"""Sessions that nobody uses: parked at once where someone asks, and closed after a long time."""

from __future__ import annotations

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.db.engine import Database, db_now
from core.db.tables import Job, SessionRow
from core.errors import Conflict
from core.jobs.base.states import FINAL, Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Actor, move
from core.jobs.lifecycle.sessions import log
from core.jobs.lifecycle.sessions.records import KIND, VIEW, FoundSession, find
from core.jobs.policies import audit

_REASON = "parked at the wish of a user; the next operation brings it back"
HEARD_SECONDS = 60.0
_THERE = frozenset({Status.PAUSED, Status.PAUSING})


def park(session: Session, actor: Actor, session_id: str) -> FoundSession:
    """Have a session leave its slot now, or give up its place in the queue. Asking twice is fine. Raises Conflict where
    it has ended, or an operation has not been computed."""
    found = find(session, actor, session_id, lock=True)
    status = Status(found.job.status)
    if status in _THERE:
        return found
    if status in FINAL or status is Status.STOPPING:
        raise Conflict(f"the session is {VIEW.get(status, status.value)}: it holds no slot", code="session_ended")
    if log.waits(session, session_id):
        words = "an operation of the session has not been computed: park it when its result is there, or close it"
        raise Conflict(words, code="session_in_use")
    data = {"actor": actor.user_id, "request_id": actor.request_id}
    queued = status is Status.QUEUED
    values = {"reserved_at": None, "reserved_node": None} if queued else {"stop_requested": StopReason.PARK}
    after = Status.PAUSED if queued else Status.PAUSING
    if move(session, found.job, after, reason=_REASON, data=data, values=values):
        audit.record(session, actor, "session.park", session_id)
    session.refresh(found.job)
    return found


def heard(database: Database, actor: Actor, start: str) -> None:
    """Note that the program lives whose sessions have names that begin so. Only parked ones can be closed as unused,
    and what is noted of these holds for HEARD_SECONDS, so that most signs of life write nothing."""
    late = [
        Job.kind == KIND,
        Job.status == Status.PAUSED.value,
        Job.name.startswith(start, autoescape=True),
        SessionRow.project_id == actor.project_id,
        SessionRow.used_at < db_now() - HEARD_SECONDS,
    ]
    with database.read() as session:
        ids = [*session.execute(select(SessionRow.id).join(Job, Job.id == SessionRow.id).where(*late)).scalars()]
    if not ids:
        return
    with database.write() as session:
        session.execute(
            update(SessionRow)
            .where(SessionRow.id.in_(ids), SessionRow.used_at < db_now() - HEARD_SECONDS)
            .values(used_at=db_now())
            .execution_options(synchronize_session=False)
        )


def close_unused(session: Session, hours: float, most: int = 100) -> list[str]:
    """Close parked sessions to which no operation has come for so long, nor a sign that their program lives; their
    ids."""
    query = (
        select(Job)
        .join(SessionRow, SessionRow.id == Job.id)
        .where(
            Job.kind == KIND,
            Job.status == Status.PAUSED.value,
            SessionRow.used_at < db_now() - hours * 3600.0,
        )
    )
    reason = f"closed: nothing has come from its program for {hours:g} hours (EFT_UNUSED_SESSION_HOURS)"
    closed = []
    for job in [*session.execute(query.order_by(Job.id).limit(most)).scalars()]:
        job_id, project_id = job.id, job.project_id
        if move(session, job, Status.CANCELLED, reason=reason):
            audit.record(session, None, "session.close", job_id, {"unused_hours": hours}, project_id=project_id)
            closed.append(job_id)
    return closed
