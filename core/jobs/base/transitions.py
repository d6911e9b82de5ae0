"""The only writer of `jobs.status` after a job's birth, and of the events that tell of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, insert, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Event, Job
from core.jobs.base import deliveries
from core.jobs.base.states import FINAL, LEASED, Status, check


@dataclass(frozen=True, slots=True)
class Actor:
    """The user, project, key and request behind a change."""

    user_id: str
    project_id: str
    request_id: str | None = None
    key_id: str | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """The right to write for one attempt. Every write of a worker carries it; a stale one changes no row."""

    job_id: str
    attempt: int
    worker: str

    def holds(self) -> list[ColumnElement[bool]]:
        return [Job.id == self.job_id, Job.attempt == self.attempt, Job.worker == self.worker, Job.status.in_(LEASED)]


def move(
    session: Session,
    job: Job,
    after: Status,
    *,
    reason: str,
    guards: Sequence[ColumnElement[bool]] = (),
    data: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Take `job` (as read in this transaction) to `after`, guarded by the state it was read in.

    Leaving the leased states gives up the lease. Returns False, and has changed nothing, when someone else was
    quicker or a guard failed.
    """
    before = Status(job.status)
    check(before, after)
    changes: dict[str, Any] = {"status": after.value, "reason": reason}
    if after not in LEASED:
        changes |= {"worker": None, "node": None, "lease_until": None, "stop_requested": None}
    if after in FINAL:
        changes |= {"finished_at": db_now()}
    changes |= dict(values or {})
    actor = (values or {}).get("worker") or job.worker or "eft"  # a user's wish names its user in `data`
    request = job.request_id  # of the submit that began it all; a later request names itself in `data`
    row = session.execute(
        update(Job)
        .where(Job.id == job.id, Job.status == before.value, Job.attempt == job.attempt, *guards)
        .values(event_seq=Job.event_seq + 1, **changes)
        .returning(Job.event_seq, Job.attempt)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if row is None:
        return False
    session.execute(
        insert(Event).values(
            job_id=job.id,
            owner_id=job.owner_id,
            project_id=job.project_id,
            seq=row.event_seq,
            attempt=row.attempt,
            type="status",
            data={
                "from": before.value,
                "to": after.value,
                "reason": reason,
                "actor": actor,
                "request_id": request,
                **(data or {}),
            },
        )
    )
    session.expire(job)
    deliveries.tell(session, job, after)
    return True


def append_events(
    session: Session,
    job: Job,
    guards: Sequence[ColumnElement[bool]],
    events: Iterable[tuple[str, float, Mapping[str, Any]]],
    values: Mapping[str, Any] | None = None,
    *,
    attempt: int | None = None,
) -> bool:
    """Add events (type, time by the node's clock, data); False: a guard failed and nothing is written.

    They are events of `attempt`; None stands for the running one.
    """
    batch = list(events)
    row = session.execute(
        update(Job)
        .where(Job.id == job.id, *guards)
        .values(event_seq=Job.event_seq + len(batch), **(values or {}))
        .returning(Job.event_seq, Job.attempt)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if row is None:
        return False
    first = row.event_seq - len(batch) + 1
    rows = [
        {
            "job_id": job.id,
            "owner_id": job.owner_id,
            "project_id": job.project_id,
            "seq": first + number,
            "attempt": row.attempt if attempt is None else attempt,
            "type": kind,
            "time": time,
            "data": dict(data),
        }
        for number, (kind, time, data) in enumerate(batch)
    ]
    if rows:
        session.execute(insert(Event), rows)
    return True
