"""The boxes: which worker serves each, what slots it has, and whether it may take anything new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Allocation, Job, Node, User
from core.errors import NotFound
from core.jobs.base import outbox
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node as it is shown."""

    node: Node
    heartbeat_age: float
    """Seconds, by the database's clock."""
    holds: Mapping[str, tuple[str, str]]
    """Slot → (job, its project) of what is held there now."""
    drained_by: str | None
    """Name of the user."""


def register(
    session: Session,
    name: str,
    worker: str,
    version: str,
    slots: Sequence[dict[str, Any]],
    notes: Sequence[str],
    labels: Sequence[str] = (),
) -> bool:
    """`worker` serves node `name` from now on; an earlier worker of that name is replaced. True: it is drained."""
    values = {"worker": worker, "version": version, "slots": list(slots), "notes": list(notes), "labels": list(labels)}
    known = session.execute(
        update(Node)
        .where(Node.name == name)
        .values(**values, started_at=db_now(), heartbeat_at=db_now())
        .returning(Node.drained_at)
    ).one_or_none()
    if known is None:
        session.execute(insert(Node).values(name=name, **values))
    return known is not None and known.drained_at is not None


def describe(session: Session, name: str, worker: str, slots: Sequence[dict[str, Any]], notes: Sequence[str]) -> None:
    """Something has changed about the slots of a node that `worker` serves."""
    session.execute(
        update(Node).where(Node.name == name, Node.worker == worker).values(slots=list(slots), notes=list(notes))
    )


def slots(session: Session, name: str) -> list[dict[str, Any]]:
    """Slots as the node's worker last described them; empty for a node without a worker so far."""
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


# -- drain


def drain(session: Session, actor: Actor, name: str, reason: str) -> None:
    """Nothing more is claimed on the node, by whatever worker, until `undrain`; what runs there is handed back: each
    trainer writes a checkpoint at its micro-step and its job waits to go on elsewhere. Asking twice is fine.

    Raises NotFound.
    """
    # The node's row before any job's, as claims and renewals do: else PostgreSQL would find them in each other's way.
    node = _find(session, name, lock=True)
    if node.drained_at is None:
        values = {"drained_at": db_now(), "drained_by": actor.user_id, "drain_reason": reason}
        session.execute(update(Node).where(Node.name == name).values(**values))
        audit.record(session, actor, "node.drain", name, {"reason": reason}, project_id=None)
    session.execute(
        update(Job)
        .where(
            Job.node == name,
            Job.status.in_((Status.PREPARING, Status.STARTING, Status.RUNNING)),
            Job.stop_requested.is_(None),
        )
        .values(stop_requested=StopReason.DRAIN)
        .execution_options(synchronize_session=False)
    )


def undrain(session: Session, actor: Actor, name: str) -> None:
    """The node takes jobs again. Asking twice is fine. Raises NotFound."""
    node = _find(session, name, lock=True)
    if node.drained_at is None:
        return
    cleared = {"drained_at": None, "drained_by": None, "drain_reason": None}
    session.execute(update(Node).where(Node.name == name).values(**cleared))
    audit.record(session, actor, "node.undrain", name, project_id=None)
    waiting = session.execute(
        select(Job.id).where(Job.status == Status.QUEUED.value).order_by(Job.created_at, Job.id).limit(1)
    ).scalar_one_or_none()
    if waiting is not None:
        outbox.ring(session, waiting)


def drained_by(session: Session, name: str | None) -> dict[str, Any]:
    """What the event of a job that is handed back says of the drain: who, and why."""
    row = session.execute(select(Node.drained_by, Node.drain_reason).where(Node.name == name)).one_or_none()
    if row is None or row.drained_by is None:
        return {}
    return {"actor": row.drained_by, "drained": {"node": name, "reason": row.drain_reason}}


def boxes(session: Session, name: str | None = None) -> list[NodeStatus]:
    """All nodes by name, or the one. Raises NotFound."""
    query = select(Node, db_now() - Node.heartbeat_at, User.name).outerjoin(User, User.id == Node.drained_by)
    rows = session.execute((query if name is None else query.where(Node.name == name)).order_by(Node.name)).all()
    if name is not None and not rows:
        raise _unknown(name)
    held = session.execute(
        select(Allocation.node, Allocation.slot, Allocation.job_id, Allocation.project_id).where(
            Allocation.released_at.is_(None)
        )
    )
    holds: dict[str, dict[str, tuple[str, str]]] = {}
    for node, slot, job_id, project_id in held:
        holds.setdefault(node, {})[slot] = (job_id, project_id)
    return [NodeStatus(node, max(0.0, float(age)), holds.get(node.name, {}), user) for node, age, user in rows]


def _find(session: Session, name: str, *, lock: bool = False) -> Node:
    query = select(Node).where(Node.name == name)
    node = session.execute(query.with_for_update() if lock else query).scalar_one_or_none()
    if node is None:
        raise _unknown(name)
    return node


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no node `{name[:60]}`; `eft nodes` lists them (`GET /nodes`)", field="name")
