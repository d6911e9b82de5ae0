"""Operations that have numbers of their own within a session, those of a sampler: who has ended, and who is not to be
computed any more."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import SessionOperation
from core.errors import SpecError
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.sessions import log
from core.jobs.lifecycle.sessions.records import FoundSession, find
from core.spec.session.verbs import READ_ONLY

MOST = 1000
"""Ends that are told at once."""


def ended(
    session: Session, actor: Actor, session_id: str, lane: str, beyond: int
) -> tuple[FoundSession, list[tuple[int, bool]], bool]:
    """The session; positions of a lane behind `beyond` that have ended, each with whether it went well; and whether
    others wait. They are told in the order of the log, so that the last one is where to go on. In a session that has
    ended all have."""
    found = find(session, actor, session_id)
    query = (
        select(SessionOperation.position, SessionOperation.done_at, SessionOperation.error)
        .where(
            SessionOperation.session_id == session_id,
            SessionOperation.model == lane,
            SessionOperation.position > beyond,
        )
        .order_by(SessionOperation.position)
        .limit(MOST)
    )
    final = Status(found.job.status) in FINAL
    told: list[tuple[int, bool]] = []
    rows: Sequence[tuple[int, float | None, object]] = [tuple(row) for row in session.execute(query)]
    for position, done_at, error in rows:
        if done_at is None and not final:
            break  # one behind it may have been cancelled: it is told when its turn comes
        told.append((position, done_at is not None and error is None))
    return found, told, len(told) < len(rows)


def is_used(session: Session, session_id: str, lane: str) -> bool:
    """Whether an operation has come in this lane."""
    query = select(SessionOperation.position).where(
        SessionOperation.session_id == session_id, SessionOperation.model == lane
    )
    return session.execute(query.limit(1)).one_or_none() is not None


def cancel(session: Session, actor: Actor, session_id: str, position: int) -> None:
    """Let an operation not be computed that changes nothing, unless it was. Asking twice is fine. Raises NotFound, and
    SpecError for one that others build on."""
    _, row = log.get(session, actor, session_id, position)
    if row.operation["op"] not in READ_ONLY:
        words = f"`{row.operation['op']}` was accepted and is computed: only what changes nothing can be cancelled"
        raise SpecError(words, field="request_id", code="invalid_value")
    told = {"code": "session_operation_cancelled", "message": "its caller has cancelled it", "field": None}
    session.execute(
        update(SessionOperation)
        .where(
            SessionOperation.session_id == session_id,
            SessionOperation.position == position,
            SessionOperation.done_at.is_(None),
        )
        .values(error=told, done_at=db_now())
        .execution_options(synchronize_session=False)
    )
