"""Maintenance: times in which nothing runs on a node, or on any. What runs when one begins leaves with a checkpoint."""

from __future__ import annotations

from sqlalchemy import ColumnElement, false, insert, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now, read_now
from core.db.tables import Job, Maintenance, Node
from core.errors import Fault, NotFound
from core.ids import new_id
from core.jobs.base.scheduler_lock import lock_scheduler
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit
from core.jobs.policies.times import BadTime, iso, ring


def plan(session: Session, actor: Actor, node: str | None, starts_at: float, ends_at: float, why: str) -> Maintenance:
    """Nothing runs on `node` (None: on any) from `starts_at` to `ends_at`: a job whose time limit reaches into it is
    not started, and what still runs then is handed back with a checkpoint. Raises NotFound, BadTime."""
    moment = lock_scheduler(session)
    if ends_at <= max(starts_at, moment):
        message = "a maintenance ends after it begins, and after now"
        raise BadTime(message, field="until", faults=(Fault("bad_time", message, "until"),))
    if node is not None and session.get(Node, node) is None:
        raise NotFound(f"there is no node `{node[:60]}`; `eft nodes` lists them (`GET /nodes`)", field="node")
    row = {"id": new_id("maint"), "node": node, "starts_at": starts_at, "ends_at": ends_at, "why": why}
    session.execute(insert(Maintenance).values(**row, user_id=actor.user_id))
    audit.record(
        session,
        actor,
        "maintenance.plan",
        node or "all nodes",
        row | {"starts_at": iso(starts_at), "ends_at": iso(ends_at)},
        project_id=None,
    )
    return session.get_one(Maintenance, row["id"])


def cancel(session: Session, actor: Actor, maintenance_id: str) -> Maintenance:
    """It does not take place, or is over now. Asking twice is fine. Raises NotFound."""
    lock_scheduler(session)
    found = session.get(Maintenance, maintenance_id, with_for_update=True)
    if found is None:
        raise NotFound("there is no such maintenance; `GET /maintenance` lists them", field="maintenance_id")
    if found.cancelled_at is None:
        session.execute(update(Maintenance).where(Maintenance.id == found.id).values(cancelled_at=db_now()))
        session.refresh(found)
        audit.record(session, actor, "maintenance.cancel", found.node or "all nodes", {"id": found.id}, project_id=None)
        ring(session)
    return found


def planned(session: Session, moment: float) -> list[Maintenance]:
    """Those that are not over, in the order of their beginnings."""
    query = select(Maintenance).where(Maintenance.ends_at > moment, Maintenance.cancelled_at.is_(None))
    return list(session.execute(query.order_by(Maintenance.starts_at, Maintenance.id)).scalars())


def begins(session: Session) -> bool:
    """Whether `begin` would ask anybody: looked at every few seconds, and mostly not the case."""
    return session.execute(select(Job.id).where(*_in_the_way(session)).limit(1)).first() is not None


def _in_the_way(session: Session) -> list[ColumnElement[bool]]:
    """What runs on nodes whose maintenance has begun and was not asked to leave yet."""
    moment = read_now(session)
    begun = [window.node for window in planned(session, moment) if window.starts_at <= moment]
    if not begun:
        return [false()]
    running: list[ColumnElement[bool]] = [
        Job.status.in_((Status.PREPARING, Status.STARTING, Status.RUNNING)),
        Job.stop_requested.is_(None),
    ]
    return running if None in begun else [*running, Job.node.in_([node for node in begun if node is not None])]


def begin(session: Session) -> int:
    """Ask what runs on nodes whose maintenance has begun to leave. Returns how many were asked; the housekeeper's."""
    asked = session.execute(
        update(Job)
        .where(*_in_the_way(session))
        .values(stop_requested=StopReason.MAINTENANCE)
        .returning(Job.id)
        .execution_options(synchronize_session=False)
    )
    return len(asked.all())
