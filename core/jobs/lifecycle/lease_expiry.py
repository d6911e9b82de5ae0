"""Jobs whose worker is gone: taken back when the lease is over, and given up where the job itself may be what ends it.

The first loss of a worker does not count against a job: machines are restarted. A job under which one worker after
the other vanishes, with no further checkpoint between them, is taken for the cause: else it would end them for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.engine import db_now, read_now
from core.db.tables import Allocation, Attempt, Job
from core.jobs.base.states import LEASED, Status
from core.jobs.base.transitions import move
from core.jobs.lifecycle.requeue import release, requeue


@dataclass(frozen=True, slots=True)
class LossPolicy:
    max_losses: int = 5
    """In a row without a further checkpoint; with the one after it the job fails."""
    backoff_seconds: float = 10.0
    """Before the attempt after the second loss in a row; doubled with each further one."""


def lose(session: Session, job: Job, why: str, policy: LossPolicy) -> None:
    """The worker of `job` (as read in this transaction) is gone. Queue it again, or end it: see the module."""
    losses = job.losses + 1
    wanted = Status(job.status) not in (Status.STOPPING, Status.PAUSING)
    if wanted and losses > policy.max_losses:
        _give_up(session, job, why, losses)
        return
    values: dict[str, Any] = {"losses": losses}
    if losses > 1:
        values["not_before"] = db_now() + policy.backoff_seconds * 2 ** min(losses - 2, 10)
    requeue(session, job, why, values)


def _give_up(session: Session, job: Job, why: str, losses: int) -> None:
    job_id, attempt = job.id, job.attempt
    message = (
        f"{losses} workers in a row were lost while they ran this job, without a new checkpoint in between (the "
        f"last: {why}). The job may be the cause: check the box's memory and its kernel log, save checkpoints "
        "more often (checkpoint.save_steps), then `retry`"
    )
    failure = {"class": "machine", "code": "worker_lost", "message": message, "field": None}
    values = {"failure": failure, "losses": losses}
    if move(session, job, Status.FAILED, reason=message, data={"failure": failure, "actor": "eft"}, values=values):
        release(session, job_id, attempt, why, None)


def reap(session: Session, policy: LossPolicy) -> list[tuple[str, int]]:
    """Take back every job whose lease has run out. Returns the (job, attempt) pairs that ended so."""
    expired = (
        session.execute(
            select(Job)
            .where(Job.lease_until.is_not(None), Job.lease_until < db_now())
            .with_for_update(skip_locked=True)
        )
        .scalars()
        .all()
    )
    taken = [(job.id, job.attempt) for job in expired]
    for job in expired:
        lose(session, job, f"worker on {job.node} was silent for longer than its lease", policy)
    return taken


def orphans(session: Session, node: str, worker: str) -> list[tuple[Job, Attempt]]:
    """Jobs that an earlier worker of this node left behind, with their attempts' processes."""
    rows = session.execute(
        select(Job, Attempt)
        .join(Attempt, (Attempt.job_id == Job.id) & (Attempt.attempt == Job.attempt))
        .where(Job.node == node, Job.worker != worker, Job.status.in_(LEASED))
    )
    return [(job, attempt) for job, attempt in rows]


def clear_slots(
    session: Session, node: str, worker: str, known: Collection[tuple[str, int]], policy: LossPolicy
) -> list[str]:
    """End what holds slots of `node` and is not among the (job, attempt) pairs `known` to run there; the jobs' ids.

    Such an allocation is `worker`'s own, and the end of its attempt could not be written; or its attempt is over. What
    another worker holds is left to its lease. Call while `worker` claims nothing.
    """
    held = session.execute(
        select(Allocation.job_id, Allocation.attempt)
        .where(Allocation.node == node, Allocation.released_at.is_(None))
        .distinct()
    ).all()
    ended = []
    for job_id, attempt in held:
        if (job_id, attempt) in known:
            continue
        job = session.execute(select(Job).where(Job.id == job_id).with_for_update()).scalar_one()
        if job.attempt != attempt or Status(job.status) not in LEASED:
            release(session, job_id, attempt, "its slot had not been given back", None)
        elif job.worker == worker:
            lose(session, job, f"the worker on {node} could not write its end", policy)
        else:
            continue
        ended.append(job_id)
    return ended


def postpone(session: Session, job_id: str, policy: LossPolicy) -> None:
    """Let others go first: `job_id` waits, and claiming it has failed. The wait is doubled with each time in a row."""
    query = select(Job).where(Job.id == job_id, Job.status == Status.QUEUED.value).with_for_update()
    job = session.execute(query).scalar_one_or_none()
    if job is not None:
        job.losses += 1
        job.not_before = read_now(session) + policy.backoff_seconds * 2 ** min(job.losses - 1, 10)
