"""Wake-up calls that survive a crash between commit and publish.

A transaction that gives workers something to look at adds a row here; the housekeeper publishes and deletes it.
A message lost or doubled on the way changes nothing: it says "look", the database says what there is.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from core.db.engine import Database
from core.db.tables import OutboxMessage
from core.ids import new_id


def ring(session: Session, job_id: str) -> None:
    """Wake the workers once this transaction has committed."""
    session.execute(insert(OutboxMessage).values(id=new_id("msg"), job_id=job_id))


def relay(database: Database, publish: Callable[[str], None], limit: int = 500) -> int:
    """Publish what waits, then forget it. A crash in between publishes again. Returns how many were sent.

    No transaction is open while publishing: a slow broker must not hold the database's write lock.
    """
    with database.read() as session:
        waiting = session.execute(
            select(OutboxMessage.id, OutboxMessage.job_id).order_by(OutboxMessage.id).limit(limit)
        ).all()
    for message in waiting:
        publish(message.job_id)
    if waiting:
        with database.write() as session:
            session.execute(delete(OutboxMessage).where(OutboxMessage.id.in_([message.id for message in waiting])))
    return len(waiting)
