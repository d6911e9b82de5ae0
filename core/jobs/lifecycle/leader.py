"""A leader lease: one live process holds a role in the whole installation."""

from __future__ import annotations

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from core.db.engine import Database, db_now
from core.db.tables import Leader


def lead(database: Database, role: str, holder: str, seconds: float) -> bool:
    """Take or keep `role` for `seconds`. False while somebody else holds it."""
    with database.read() as session:
        row = session.execute(
            select(Leader.holder, Leader.until, db_now().label("now")).where(Leader.role == role)
        ).one_or_none()
    if row is not None and row.holder != holder and row.until >= row.now:
        return False  # the usual case for everybody but the leader, and it writes nothing
    with database.write() as session:
        taken = session.execute(
            update(Leader)
            .where(Leader.role == role, or_(Leader.holder == holder, Leader.until < db_now()))
            .values(holder=holder, until=db_now() + seconds)
            .returning(Leader.role)
        ).one_or_none()
    if taken is not None or row is not None:
        return taken is not None
    try:
        with database.write() as session:
            session.execute(insert(Leader).values(role=role, holder=holder, until=db_now() + seconds))
    except IntegrityError:
        return False  # two began at the same moment; the other one was first
    return True


def resign(database: Database, role: str, holder: str) -> None:
    """Let the next one lead at once."""
    with database.write() as session:
        session.execute(delete(Leader).where(Leader.role == role, Leader.holder == holder))
