"""What the leading housekeeper clears away."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, select, tuple_
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import File, IdempotencyKey, Job, Project
from core.ids import made_at


def forget_answers(session: Session, hours: float, limit: int = 1000) -> int:
    """Delete stored answers to Idempotency-Keys that are older than `hours`, oldest first. Returns how many went.

    At most `limit` a transaction, to keep the write lock short; call it again while the answer is `limit`.
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


def unknown_files(session: Session, file_ids: Sequence[str], table: type[File] | type[Job] = File) -> list[str]:
    """Those that no row of the table names and that this database could know: what is older than its first project was
    stored for another one (a data root that was given a new database), and is not ours to delete."""
    began = session.execute(select(func.min(Project.created_at))).scalar_one()
    if began is None:
        return []
    known: set[str] = set()
    for start in range(0, len(file_ids), 500):  # SQLite has a limit of parameters
        known.update(session.execute(select(table.id).where(table.id.in_(file_ids[start : start + 500]))).scalars())
    return [file_id for file_id in file_ids if file_id not in known and made_at(file_id) > began]
