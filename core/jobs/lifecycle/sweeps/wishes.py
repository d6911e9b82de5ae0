"""What people ask of sweeps: make one, cancel it, delete it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, update
from sqlalchemy.orm import Session

from core.db.tables import Job, SweepRow
from core.errors import Conflict
from core.ids import new_id
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import submit as jobs
from core.jobs.lifecycle.sweeps import records
from core.jobs.lifecycle.sweeps.records import SweepStatus
from core.jobs.policies import audit
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits
from core.spec.job import JobSpec


def create(
    session: Session,
    actor: Actor,
    name: str | None,
    spec: dict[str, Any],
    runs: Sequence[tuple[dict[str, Any], JobSpec]],
    bounds: VolumeLimits = NO_BOUNDS,
) -> SweepRow:
    """Insert a sweep and submit all of its runs (point and resolved job), in the caller's transaction.

    Raises EftError where one of them cannot be submitted; QueueFull and SpecsFull beyond `bounds`.
    """
    sweep_id = new_id("sweep")
    owned = {"owner_id": actor.user_id, "project_id": actor.project_id}
    values: dict[str, Any] = {"name": name, "spec": spec, "rungs": [], "waiting": [], "request_id": actor.request_id}
    session.execute(insert(SweepRow).values(id=sweep_id, **owned, **values, reason=f"{len(runs)} runs"))
    for point, job in runs:
        jobs.submit(session, actor, job, sweep=(sweep_id, point), bounds=bounds)
    audit.record(session, actor, "sweep.submit", sweep_id, {"name": name, "runs": len(runs)})
    return records.find(session, actor, sweep_id)


def cancel(session: Session, actor: Actor, sweep_id: str) -> SweepRow:
    """Cancel all runs that have not ended. Asking twice is fine. Raises Conflict for a sweep that has ended."""
    sweep = records.find(session, actor, sweep_id, lock=True)
    match SweepStatus(sweep.status):
        case SweepStatus.CANCELLED:
            return sweep
        case SweepStatus.SUCCEEDED | SweepStatus.FAILED:
            raise Conflict(f"the sweep has already {sweep.status}; there is nothing to cancel", code="already_final")
        case SweepStatus.RUNNING:
            pass
    for job in records.runs_of(session, sweep_id):
        if Status(job.status) not in FINAL:
            try:
                jobs.cancel(session, actor, job.id)
            except Conflict:  # it has come to its end meanwhile
                continue
    whose = "its owner" if actor.user_id == sweep.owner_id else "somebody of the project"
    runs = records.runs_of(session, sweep_id)
    records.end(session, sweep, SweepStatus.CANCELLED, f"cancelled by {whose}", runs)
    audit.record(session, actor, "sweep.cancel", sweep_id, {})
    return sweep


def remove(session: Session, actor: Actor, sweep_id: str) -> None:
    """Delete the row of a sweep that has ended; its jobs stay. Raises NotFound, Conflict."""
    sweep = records.find(session, actor, sweep_id, lock=True)
    if SweepStatus(sweep.status) is SweepStatus.RUNNING:
        words = "the sweep is running; only an ended sweep can be deleted: cancel it, or wait for its end"
        raise Conflict(words, field="sweep_id", code="not_ended")
    told = {"name": sweep.name, "status": sweep.status}
    loose = update(Job).where(Job.sweep_id == sweep_id).values(sweep_id=None)
    session.execute(loose.execution_options(synchronize_session=False))
    session.execute(delete(SweepRow).where(SweepRow.id == sweep_id).execution_options(synchronize_session=False))
    audit.record(session, actor, "sweep.delete", sweep_id, told)
