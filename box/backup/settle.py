"""What a restored database must forget: that workers of another time hold its jobs.

Every lease is void: what ran is queued again (or is cancelled, or paused, where its owner had asked for that) and goes
on from the newest checkpoint of the backup. The time between the backup and the restore is not charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from core.db.tables import Allocation, Attempt, Delivery, Installation, Job, Leader
from core.jobs.base.states import LEASED
from core.jobs.lifecycle.requeue import requeue
from core.jobs.policies import audit

Notices = Literal["hold", "send"]
RESTORED = "backup.restore"
"""In the audit, with the snapshot's name."""
HELD = "held by a restore: it may have been sent before; resend it if it was not"


@dataclass(frozen=True, slots=True)
class Settled:
    handed_back: list[str]
    """Jobs that were held by a worker."""
    held: int
    """Notices that were waiting to be sent and are dead letters now."""


def settle(session: Session, snapshot: str, taken_at: float, notices: Notices, *, mark: str | None = None) -> Settled:
    """Call once, in a write transaction, before anything else sees the database. `taken_at`: of the snapshot. `mark`:
    what the installation's row says of its data root from now on; None: the first process that comes marks it as this
    installation's own."""
    jobs = session.execute(select(Job).where(Job.status.in_(LEASED)).order_by(Job.id)).scalars().all()
    ids = [job.id for job in jobs]
    for job in jobs:
        job_id, attempt = job.id, job.attempt
        requeue(session, job, f"the installation was restored from the backup {snapshot}")
        for table, ended in ((Allocation, Allocation.released_at), (Attempt, Attempt.ended_at)):
            session.execute(
                update(table)
                .where(table.job_id == job_id, table.attempt == attempt, ended > taken_at)
                .values({ended.key: taken_at})
            )
    session.execute(delete(Leader))
    session.execute(update(Installation).values(mark=mark, marked_at=None, marked_by=None))
    held = 0
    if notices == "hold":
        # Whether they were sent between the backup and the loss is unknown.
        held = len(
            session.execute(
                update(Delivery)
                .where(Delivery.state == "pending")
                .values(state="dead", last_error=HELD)
                .returning(Delivery.id)
                .execution_options(synchronize_session=False)
            ).all()
        )
    told = {"handed_back": ids, "notices_held": held}
    audit.record(session, None, RESTORED, snapshot, told, project_id=None)
    return Settled(ids, held)
