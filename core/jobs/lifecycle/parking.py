"""What sessions and served models share: they leave their slot when nobody uses them, and are brought back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Job, ServingRow, SessionRow
from core.jobs.base import outbox
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Token, move

Kept = type[SessionRow] | type[ServingRow]
"""Table with the row of a session or of a serving beside its job."""


def running(session: Session, token: Token, table: Kept) -> Job | None:
    """Lock and get the job of this attempt. None: the attempt has lost it, or it does not run."""
    row = session.execute(
        select(table, Job).join(Job, Job.id == table.id).where(*token.holds()).with_for_update()
    ).one_or_none()
    return row.Job if row is not None and row.Job.status == Status.RUNNING.value else None


def unused(session: Session, token: Token, table: Kept, seconds: float) -> bool:
    """Whether nobody has used it for so long."""
    query = select(table.id).where(table.id == token.job_id, table.used_at < db_now() - seconds)
    return session.execute(query).first() is not None


def leave(session: Session, token: Token, job: Job, why: str) -> bool:
    """Ask the job's child to leave its slot."""
    values = {"stop_requested": StopReason.PARK}
    return move(session, job, Status.PAUSING, reason=why, guards=token.holds(), values=values)


def bring_back(session: Session, job: Job, why: str, data: Mapping[str, Any] | None = None) -> bool:
    """Queue a parked job again. False: it is not parked."""
    if job.status != Status.PAUSED.value or not move(session, job, Status.QUEUED, reason=why, data=data):
        return False
    outbox.ring(session, job.id)
    return True
