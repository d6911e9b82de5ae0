"""Sessions of one base model in one process: who may join whom.

The host has claimed a slot. A guest has a lease and a fencing token of its own, and no slot; where its host leaves, it
goes back to the queue. All who are in a process at a time are billed for equal parts of its slot. A session that waits
joins only when its turn would have come: quotas hold it as they hold any job.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from core.db.tables import WAITS_FOR, Job, Node
from core.jobs.base.scheduler_lock import lock_scheduler
from core.jobs.base.slots import Slot
from core.jobs.base.states import Status
from core.jobs.base.transitions import Token
from core.jobs.kinds import Kind
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.sessions.records import KIND
from core.jobs.scheduling import queue_order

MOST_FAILURES = 1
"""Failures of processes since its last snapshot after which a session gets one of its own: it may be the cause."""
LOOK = 64
"""Waiting sessions that are looked at."""
_OF_ITS_OWN = frozenset({"name", "tags", "note", "priority", "method"})
"""Fields of a spec in which sessions of one process may differ."""


def join(
    session: Session, host: Token, slots: tuple[Slot, ...], lease_seconds: float, *, room: int | None = None
) -> Claim | None:
    """Let the next waiting session of the host's project and base into its process; None: there is none, or the host
    leaves. Call in a write transaction of its own. `slots`, `room`: as for `claims.claim`."""
    now = lock_scheduler(session)
    running = select(Job).where(*host.holds(), Job.status == Status.RUNNING.value, Job.stop_requested.is_(None))
    job = session.execute(running.with_for_update()).scalar_one_or_none()
    if job is None or job.node is None or job.machine_failures > MOST_FAILURES:
        return None
    drained_at = select(Node.drained_at).where(Node.name == job.node).with_for_update(read=True)
    if session.execute(drained_at).scalar_one_or_none() is not None:
        return None
    conditions = queue_order.ready(now, room, None)
    query = (
        select(Job)
        .where(
            text(WAITS_FOR[Kind.TRAIN]),
            Job.kind == KIND,
            Job.project_id == job.project_id,
            Job.machine_failures <= MOST_FAILURES,
            *conditions,
        )
        .order_by(Job.priority.desc(), Job.created_at, Job.id)
        .limit(LOOK)
        .with_for_update(skip_locked=True)
    )
    base = _base(job)
    waiting = [one for one in session.execute(query).scalars() if _base(one) == base]
    if not waiting:
        return None
    order = queue_order.look(session, Kind.TRAIN, now, conditions)
    for one in waiting:
        if order.held(queue_order.waiting(one)) is None:
            return claims.take(session, one, host.worker, job.node, slots, lease_seconds, host=host)
    return None


def _base(job: Job) -> Mapping[str, Any]:
    """What sessions of one process have in common: model, format and precision of the base, and what slots it needs. A
    session that trains the model itself has nothing in common with any."""
    if job.spec["method"]["type"] == "full":
        return {"alone": job.id}
    fields = {name: value for name, value in job.spec.items() if name not in _OF_ITS_OWN}
    return fields | {"prepared": job.prepared, "adjusted": job.adjusted or {}, "settled": job.settled}
