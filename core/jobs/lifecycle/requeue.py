"""The end of an attempt without an outcome: slots are freed, and the job is queued again or ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Allocation, Attempt, Job, SlotGuest
from core.jobs.base import outbox
from core.jobs.base.states import LEASED, Status
from core.jobs.base.transitions import move
from core.jobs.scheduling import runtime_estimates


def release(
    session: Session, job_id: str, attempt: int, outcome: str, exit_code: int | None, *, paced: bool = False
) -> None:
    """Free the slots and close the attempt. Call once the process group is dead, or the lease has run out. `paced`: it
    has left with a checkpoint of where it was."""
    freed = session.execute(
        update(Allocation)
        .where(Allocation.job_id == job_id, Allocation.attempt == attempt, Allocation.released_at.is_(None))
        .values(released_at=db_now())
        .returning(Allocation.slot)
        .execution_options(synchronize_session=False)
    ).all()
    session.execute(
        update(SlotGuest)
        .where(SlotGuest.job_id == job_id, SlotGuest.attempt == attempt, SlotGuest.ended_at.is_(None))
        .values(ended_at=db_now())
    )
    for _ in freed[1:]:  # the thread that ran it looks for one job; the other slots need a bell each
        outbox.ring(session, job_id)
    session.execute(
        update(Attempt)
        .where(Attempt.job_id == job_id, Attempt.attempt == attempt, Attempt.ended_at.is_(None))
        .values(ended_at=db_now(), outcome=outcome, exit_code=exit_code)
    )
    runtime_estimates.keep(session, job_id, paced=paced)


def requeue(session: Session, job: Job, why: str, values: Mapping[str, Any] | None = None) -> None:
    """The worker of `job` is gone: queue the job (with these `values`), or end it where its owner had asked for that.

    core/jobs/lifecycle/lease_expiry.py counts such losses; here none is.
    """
    job_id, attempt = job.id, job.attempt
    if Status(job.status) is Status.STOPPING:
        moved = move(session, job, Status.CANCELLED, reason=f"cancelled ({why})", data={"actor": "eft"})
    elif Status(job.status) is Status.PAUSING:
        moved = move(session, job, Status.PAUSED, reason=f"paused ({why})", data={"lost": True, "actor": "eft"})
    else:
        data = {"lost": True, "actor": "eft"}
        moved = move(session, job, Status.QUEUED, reason=f"waits to continue: {why}", data=data, values=values)
        if moved:
            outbox.ring(session, job_id)
    if moved:
        release(session, job_id, attempt, why, None)


def requeue_unacknowledged(session: Session, worker: str, known: Collection[tuple[str, int]]) -> list[str]:
    """Hand back what `worker` holds beside the `known` (job, attempt) pairs; the jobs' ids.

    The database may have gone away between the commit of a claim and its answer. Call while that worker claims nothing.
    """
    held = session.execute(
        select(Job).where(Job.worker == worker, Job.lease_until.is_not(None), Job.status.in_(LEASED)).with_for_update()
    )
    jobs = [job for job in held.scalars() if (job.id, job.attempt) not in known]
    ids = [job.id for job in jobs]
    for job in jobs:
        requeue(session, job, "its worker did not learn that its claim had succeeded")
    return ids
