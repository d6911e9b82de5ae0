"""Jobs that wait for the end of others: `after` of a spec.

A job that waits stands in no line. When the jobs that it waits for have ended, the leading housekeeper puts it there,
or cancels it where one of them did not end as it had to, under the lock of its row and in one transaction. Two
housekeepers at once do no harm: the second one finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import insert, select, text, update
from sqlalchemy.orm import Session

from core.db.engine import db_now, read_now
from core.db.tables import AFTER_OTHERS, Job, JobDependency
from core.errors import Fault, SpecError
from core.jobs.base import outbox
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import append_events, move
from core.jobs.policies import disk_room
from core.spec.job import After

SHOWN = 3
"""Jobs that an explanation names."""


def states(session: Session, project_id: str, after: Sequence[After], *, lock: bool = False) -> dict[str, Status]:
    """The status of each job that is to be waited for. Raises SpecError for one that is missing, or has ended as it
    must not."""
    query = select(Job.id, Job.status).where(
        Job.id.in_([one.job for one in after]), Job.project_id == project_id, Job.kind == "train"
    )
    rows = session.execute(query.with_for_update(read=True) if lock else query)
    found = {row.id: Status(row.status) for row in rows}
    for number, one in enumerate(after):
        field = f"after.{number}.job"
        status = found.get(one.job)
        if status is None:
            words = (
                f"there is no job `{one.job}` in this project; a job can only wait for jobs that have been submitted"
            )
            raise refused(Fault("after_not_found", words, field))
        if status in FINAL and status is not Status.SUCCEEDED and one.on == "success":
            words = (
                f"`{one.job}` has {_past(status)}, so this job would never start: name its retry, or set `on: end` to "
                "start however it ends"
            )
            raise refused(Fault("after_failed", words, field))
    return found


def pin(session: Session, project_id: str, after: Sequence[After]) -> list[After]:
    """Those that have not ended yet. None of them can be deleted before the caller's transaction has ended.

    Raises SpecError as `states`.
    """
    if not after:
        return []
    found = states(session, project_id, after, lock=True)
    return [one for one in after if found[one.job] not in FINAL]


def write_down(session: Session, job: Job, after: Sequence[After]) -> None:
    """Store what a new job waits for."""
    owned = {"job_id": job.id, "owner_id": job.owner_id, "project_id": job.project_id}
    for one in after:
        session.execute(insert(JobDependency).values(**owned, after_id=one.job, on=one.on))


def due(session: Session) -> list[str]:
    """List waiting jobs of which another one has ended since, oldest first."""
    ended = (
        select(JobDependency.job_id)
        .outerjoin(Job, Job.id == JobDependency.after_id)
        .where(JobDependency.met_at.is_(None), Job.id.is_(None) | Job.status.in_([status.value for status in FINAL]))
    )
    query = select(Job.id).where(text(AFTER_OTHERS), Job.id.in_(ended))
    return list(session.execute(query.order_by(Job.id)).scalars())


def settle(session: Session, job_id: str) -> bool:
    """Put a job into the line if nothing is left to wait for, or cancel it. False: it goes on waiting."""
    query = select(Job).where(Job.id == job_id, text(AFTER_OTHERS)).with_for_update()
    job = session.execute(query).scalar_one_or_none()
    if job is None:
        return False
    open_ones = _unmet(session, job_id)
    met = []
    for one, status, name in open_ones:
        if status is not None and status not in FINAL:
            continue
        if one.on == "success" and status is not Status.SUCCEEDED:
            how = "was deleted" if status is None else f"has {_past(status)}"
            reason = f"cancelled: {_called(one.after_id, name)} {how}, and had to succeed first"
            return move(session, job, Status.CANCELLED, reason=reason, data={"after": one.after_id})
        met.append(one.after_id)
    if not met:
        return False
    session.execute(
        update(JobDependency)
        .where(JobDependency.job_id == job_id, JobDependency.after_id.in_(met))
        .values(met_at=db_now())
        .execution_options(synchronize_session=False)
    )
    left = len(open_ones) - len(met)
    values: dict[str, object] = {"unmet": left}
    if job.status == Status.QUEUED.value:
        values["reason"] = words(session, job_id) if left else disk_room.WAITS_FOR_MODEL
    append_events(session, job, [], [("after", read_now(session), {"ended": met, "left": left})], values)
    if not left:
        outbox.ring(session, job_id)
    return left == 0


def words(session: Session, job_id: str) -> str:
    """What a job waits for, for people."""
    parts = [
        f"{_called(one.after_id, name)} to {'succeed' if one.on == 'success' else 'end'}"
        for one, _, name in _unmet(session, job_id)
    ]
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return f"waits for {', '.join(parts[:SHOWN])}{more}"


def waits_for(session: Session, job_id: str) -> Sequence[str]:
    """Jobs that still wait for this one, oldest first."""
    query = (
        select(Job.id)
        .join(JobDependency, JobDependency.job_id == Job.id)
        .where(JobDependency.after_id == job_id, JobDependency.met_at.is_(None), text(AFTER_OTHERS))
    )
    return session.execute(query.order_by(Job.id)).scalars().all()


def _unmet(session: Session, job_id: str) -> list[tuple[JobDependency, Status | None, str | None]]:
    query = (
        select(JobDependency, Job.status, Job.name)
        .outerjoin(Job, Job.id == JobDependency.after_id)
        .where(JobDependency.job_id == job_id, JobDependency.met_at.is_(None))
        .order_by(JobDependency.after_id)
    )
    return [
        (one, None if status is None else Status(status), name) for one, status, name in session.execute(query).all()
    ]


def _called(job_id: str, name: str | None) -> str:
    return f"`{job_id}` ({name})" if name else f"`{job_id}`"


def _past(status: Status) -> str:
    return "been cancelled" if status is Status.CANCELLED else status.value


def refused(fault: Fault) -> SpecError:
    """An error of one field."""
    return SpecError(f"{fault.field}: {fault.message}", field=fault.field, faults=(fault,), code=fault.code)
