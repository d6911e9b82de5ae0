"""Claims, holds and maintenance one after the other, so that each sees what the one before it has done."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.orm import Session

from core.db.engine import read_now

_LOCK = 6710615
"""Number of PostgreSQL's advisory lock; 6710614 is the migrations'."""


def lock_scheduler(session: Session) -> float:
    """Wait until no other transaction is choosing, then hold the turn to its end. Returns the database's time.

    Take it before any row. On SQLite a writer is alone anyway.
    """
    if session.get_bind().dialect.name == "postgresql":
        session.execute(text(f"select pg_advisory_xact_lock({_LOCK})"))
    return read_now(session)
