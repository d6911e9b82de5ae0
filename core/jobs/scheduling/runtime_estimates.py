"""How long jobs take: what is known of the end of a running one, and of how long a waiting one will hold its slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Attempt, Job
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Token
from core.jobs.kinds import ON_TRAINING_SLOTS

OVERDUE_SECONDS = 150.0
"""Time after which an overdue job's estimate is no longer used."""
PACE_SHARE, PACE_SECONDS = 1.25, 300.0
"""A run that goes on from its checkpoint takes what its trainer said was left, and at the most this much more: it loads
its model again, and a step may take longer than before."""


@dataclass(frozen=True, slots=True)
class Left:
    """Seconds that a running job has still to go."""

    by_pace: float | None
    """Time for the steps left at its recorded pace; None: it has not reported a pace."""
    by_limit: float | None
    """Its time limit; None: it has none."""
    may_stop_early: bool
    """Its evaluations may end it before its last step."""
    overdue: float = 0.0
    """Since it should have been over by its pace: it writes what it hands back, or hangs."""

    @property
    def expected(self) -> float | None:
        known = [seconds for seconds in (self.by_pace, self.by_limit) if seconds is not None]
        return min(known) if known else None

    @property
    def surely(self) -> float | None:
        """It does not leave by itself before that; None: it may at any moment, as far as anybody knows."""
        unsure = self.by_pace is None or self.may_stop_early or self.overdue > OVERDUE_SECONDS
        return None if unsure else self.expected


def left(running: Job, began: float | None, spent: float, now: float) -> Left:
    """`began`: when its attempt did; `spent`: what all its attempts have used of its time limit."""
    progress = running.progress or {}
    told_at = max(at for at in (running.progress_at, began, 0.0) if at is not None) or now
    step, total = progress.get("step"), progress.get("total_steps")
    by_pace, overdue = None, 0.0
    if progress.get("seconds_left") is not None:
        rest = float(progress["seconds_left"]) - max(0.0, now - told_at)
        by_pace, overdue = max(0.0, rest), max(0.0, -rest)
    elif step and total and began is not None:
        by_pace = (now - began) / step * (total - step)
    limit = running.spec["resources"].get("max_runtime_seconds")
    stopping = ((running.spec.get("evaluation") or {}).get("early_stopping") or {}).get("type", "none")
    return Left(by_pace, None if limit is None else max(0.0, limit - spent), stopping != "none", overdue)


def bound(limit: float | None, spent: float, seconds_left: float | None) -> float | None:
    """Seconds that a waiting job will hold its slots at the most. `seconds_left`: by the trainer that wrote the
    checkpoint from which it goes on."""
    known = [] if limit is None else [max(0.0, limit - spent)]
    if seconds_left is not None:
        known.append(seconds_left * PACE_SHARE + PACE_SECONDS)
    return min(known) if known else None


def keep(session: Session, job_id: str, *, paced: bool) -> None:
    """Write down the bound of a job that has left its slots and may wait for others. `paced`: it has left with a
    checkpoint of where it was."""
    row = session.execute(
        select(Job.spec, Job.progress).where(Job.id == job_id, Job.status.not_in([one.value for one in FINAL]))
    ).one_or_none()
    if row is None:
        return
    limit = row.spec.get("resources", {}).get("max_runtime_seconds")
    seconds_left = (row.progress or {}).get("seconds_left") if paced else None
    most = bound(limit, 0.0 if limit is None else spent(session, job_id), seconds_left)
    session.execute(update(Job).where(Job.id == job_id).values(bound_seconds=most))


def spent(session: Session, job_id: str) -> float:
    """An attempt that was lost counts until it was taken back: up to a lease longer than it ran."""
    query = select(func.sum(func.coalesce(Attempt.ended_at, db_now()) - Attempt.started_at))
    return float(
        session.execute(query.where(Attempt.job_id == job_id, Attempt.kind.in_(ON_TRAINING_SLOTS))).scalar_one() or 0.0
    )


def of_running(session: Session, jobs: list[Job], now: float) -> dict[str, Left]:
    """The time left of each of these running jobs."""
    wanted = [job.id for job in jobs]
    if not wanted:
        return {}
    used: dict[str, float] = {}
    began: dict[str, float] = {}
    numbers = {job.id: job.attempt for job in jobs}
    rows: Any = session.execute(
        select(Attempt.job_id, Attempt.attempt, Attempt.started_at, Attempt.ended_at).where(
            Attempt.job_id.in_(wanted), Attempt.kind.in_(ON_TRAINING_SLOTS)
        )
    )
    for job_id, attempt, started_at, ended_at in rows:
        used[job_id] = used.get(job_id, 0.0) + (now if ended_at is None else ended_at) - started_at
        if attempt == numbers[job_id]:
            began[job_id] = started_at
    return {job.id: left(job, began.get(job.id), used.get(job.id, 0.0), now) for job in jobs}


def began(session: Session, token: Token) -> None:
    """Note that an attempt does what it was started for; what came before was loading."""
    session.execute(
        update(Attempt)
        .where(Attempt.job_id == token.job_id, Attempt.attempt == token.attempt, Attempt.training_at.is_(None))
        .values(training_at=db_now())
    )


LEAVING = (Status.PAUSING.value, Status.STOPPING.value)


def leaves(job: Job) -> bool:
    """It was asked to go: its slots are free in a moment."""
    return job.stop_requested is not None or job.status in LEAVING
