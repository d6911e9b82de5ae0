"""The boxes: which worker serves each, and what slots it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Node


def register(
    session: Session, name: str, worker: str, version: str, slots: Sequence[dict[str, Any]], notes: Sequence[str]
) -> None:
    """`worker` serves node `name` from now on; an earlier worker of that name is replaced."""
    values = {"worker": worker, "version": version, "slots": list(slots), "notes": list(notes)}
    known = session.execute(
        update(Node)
        .where(Node.name == name)
        .values(**values, started_at=db_now(), heartbeat_at=db_now())
        .returning(Node.name)
    ).one_or_none()
    if known is None:
        session.execute(insert(Node).values(name=name, **values))


def describe(session: Session, name: str, worker: str, slots: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    """Something has changed about the slots of a node that `worker` serves."""
    session.execute(
        update(Node).where(Node.name == name, Node.worker == worker).values(slots=list(slots), notes=list(notes))
    )


def slots(session: Session, name: str) -> list[dict[str, Any]]:
    """As the node's worker has described them last; empty for a node that nobody has served yet."""
    return session.execute(select(Node.slots).where(Node.name == name)).scalar_one_or_none() or []


def heartbeat(session: Session, name: str, worker: str) -> bool:
    """False: another worker has taken this node's name."""
    row = session.execute(
        update(Node).where(Node.name == name, Node.worker == worker).values(heartbeat_at=db_now()).returning(Node.name)
    ).one_or_none()
    return row is not None


def alive(session: Session, seconds: float) -> int:
    """How many nodes were heard of in the last `seconds`."""
    query = select(func.count()).select_from(Node).where(Node.heartbeat_at > db_now() - seconds)
    return session.execute(query).scalar_one()
