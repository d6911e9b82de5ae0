"""What the leading housekeeper clears away."""

from __future__ import annotations

from sqlalchemy import delete, select, tuple_
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import IdempotencyKey


def forget_answers(session: Session, hours: float, limit: int = 1000) -> int:
    """Delete stored answers to Idempotency-Keys that are older than `hours`, oldest first. Returns how many went.

    At most `limit` a transaction, so that nobody waits for the write lock; call it again while the answer is `limit`.
    """
    old = (
        select(IdempotencyKey.project_id, IdempotencyKey.key)
        .where(IdempotencyKey.created_at < db_now() - hours * 3600)
        .order_by(IdempotencyKey.created_at)
        .limit(limit)
    )
    gone = session.execute(
        delete(IdempotencyKey)
        .where(tuple_(IdempotencyKey.project_id, IdempotencyKey.key).in_(old))
        .returning(IdempotencyKey.key)
    )
    return len(gone.all())
