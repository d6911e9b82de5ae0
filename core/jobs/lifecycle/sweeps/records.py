"""Rows of sweeps: find them, their runs, and the best of these."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Job, Metric, SweepRow
from core.errors import NotFound
from core.jobs.base import deliveries
from core.jobs.base.figures import figure
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.base.states import Status
from core.jobs.base.transitions import Actor


class SweepStatus(StrEnum):
    RUNNING = "running"
    """One of its runs has not ended."""
    SUCCEEDED = "succeeded"
    """A run has succeeded."""
    FAILED = "failed"
    CANCELLED = "cancelled"


def find(session: Session, actor: Actor, sweep_id: str, *, lock: bool = False) -> SweepRow:
    """Get a sweep of the actor's project. Raises NotFound if it is missing or another project's."""
    query = select(SweepRow).where(SweepRow.id == sweep_id, SweepRow.project_id == actor.project_id)
    row = session.execute(query.with_for_update() if lock else query).scalar_one_or_none()
    if row is None:
        raise NotFound(f"there is no sweep `{sweep_id[:60]}` in this project", field="sweep_id")
    return row


def page(session: Session, project_id: str, *, after: str | None = None, limit: int = 20) -> ResultPage[SweepRow]:
    """Sweeps of a project, newest first. Raises UnknownCursor when `after` is none of them."""
    query = select(SweepRow).where(SweepRow.project_id == project_id)
    if after is not None:
        known = select(SweepRow.id).where(SweepRow.id == after, SweepRow.project_id == project_id)
        if session.execute(known).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a sweep in this project", field="after")
        query = query.where(SweepRow.id < after)
    rows = session.execute(query.order_by(SweepRow.id.desc()).limit(limit + 1)).scalars().all()
    return ResultPage(rows[:limit], len(rows) > limit)


def runs_of(session: Session, sweep_id: str) -> Sequence[Job]:
    """The jobs of a sweep, in the order of its points."""
    return session.execute(select(Job).where(Job.sweep_id == sweep_id).order_by(Job.id)).scalars().all()


def value_of(sweep: SweepRow, job: Job) -> float | None:
    """The figure by which runs are compared; None: the job has not succeeded, or its result does not have it."""
    value = figure(job.result or {}, sweep.spec["metric"]) if job.status == Status.SUCCEEDED.value else None
    return None if value is None or value != value else value


def best_of(sweep: SweepRow, jobs: Sequence[Job]) -> str | None:
    """The run with the best figure; of equal ones the first."""
    sign = 1 if sweep.spec["goal"] == "min" else -1
    ranked = [(sign * value, job.id) for job in jobs if (value := value_of(sweep, job)) is not None]
    return min(ranked)[1] if ranked else None


def end(session: Session, sweep: SweepRow, status: SweepStatus, reason: str, jobs: Sequence[Job]) -> None:
    """Write its final status, with the notices. The caller holds the row's lock."""
    session.execute(
        update(SweepRow)
        .where(SweepRow.id == sweep.id)
        .values(status=status.value, reason=reason, finished_at=db_now())
        .execution_options(synchronize_session=False)
    )
    session.refresh(sweep)
    about = {
        "id": sweep.id,
        "name": sweep.name,
        "project_id": sweep.project_id,
        "status": status.value,
        "reason": reason,
        "best": best_of(sweep, jobs),
        "runs": len(jobs),
        "created_at": sweep.created_at,
        "finished_at": sweep.finished_at,
    }
    named = jobs[0].spec.get("notify", ()) if jobs else ()  # the same in each of them
    deliveries.tell_end(session, sweep.owner_id, sweep.project_id, f"sweep.{status.value}", about, named)


def measured(
    session: Session, job_ids: Sequence[str], metric: str, steps: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Job to step to value, of the latest attempt that did the step."""
    found: dict[str, dict[int, float]] = {job_id: {} for job_id in job_ids}
    query = select(Metric.job_id, Metric.step, Metric.value).where(
        Metric.job_id.in_(list(job_ids)), Metric.name == metric, Metric.step.in_(list(steps))
    )
    for job_id, step, value in session.execute(query.order_by(Metric.attempt)):
        found[job_id][step] = value
    return found
