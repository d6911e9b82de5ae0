"""The books of usage: what slots were held, charged to their owners once they are free again.

A row of `allocations` is the truth. The leading housekeeper folds those that have ended into `usage` (faded, for fair
share) and `usage_days` (plain, for quotas and the report) and marks them, in one transaction; until then every reader
counts them from their rows, so that nothing waits for the books.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, func, insert, select
from sqlalchemy.orm import Session

from core.db.engine import read_now
from core.db.tables import Allocation, File, Job, UsageDay, UsageTotal
from core.jobs.base.shares import HALF_LIFE_SECONDS, Booked, UsageSpan, effective, faded, weighed
from core.jobs.base.states import FINAL, Status

DAY = 86_400


def booked(session: Session) -> list[Booked]:
    """What is charged: a row for an owner and a project."""
    rows = session.execute(
        select(UsageTotal.owner_id, UsageTotal.project_id, UsageTotal.billed, UsageTotal.at).order_by(
            UsageTotal.owner_id, UsageTotal.project_id
        )
    )
    return [Booked(*row) for row in rows]


def open_spans(session: Session) -> list[UsageSpan]:
    """What is not: about one a slot, and what ended in the last seconds."""
    rows = session.execute(
        select(
            Allocation.owner_id,
            Allocation.project_id,
            Allocation.created_at,
            Allocation.released_at,
            Allocation.billing,
            Allocation.gpus,
            Allocation.job_id,
            Allocation.attempt,
        )
        .where(Allocation.charged_at.is_(None))
        .order_by(Allocation.job_id, Allocation.attempt, Allocation.slot)
    )
    return [UsageSpan(*row[:6], attempt=(row[6], row[7])) for row in rows]


def due(session: Session) -> bool:
    """Whether `charge` would find anything: asked every few seconds, and mostly not the case."""
    query = select(Allocation.job_id).where(Allocation.charged_at.is_(None), Allocation.released_at.is_not(None))
    return session.execute(query.limit(1)).first() is not None


def charge(session: Session, half_life: float = HALF_LIFE_SECONDS, limit: int = 500) -> int:
    """Charge what has ended, at most `limit` rows a transaction. Returns how many; call again while it is `limit`."""
    query = _due().limit(limit).with_for_update(skip_locked=True)  # two that believe to lead: each row is charged once
    return _book(session, session.execute(query).scalars().all(), half_life)


def charge_job(session: Session, job_id: str, half_life: float = HALF_LIFE_SECONDS) -> int:
    """The same for one job, whose rows are about to go."""
    query = _due().where(Allocation.job_id == job_id).with_for_update()
    return _book(session, session.execute(query).scalars().all(), half_life)


def _due() -> Select[Allocation]:
    ended = select(Allocation).where(Allocation.charged_at.is_(None), Allocation.released_at.is_not(None))
    return ended.order_by(Allocation.job_id, Allocation.attempt, Allocation.slot)


def _book(session: Session, ended: Sequence[Allocation], half_life: float) -> int:
    if not ended:
        return 0
    now = read_now(session)
    billed: dict[tuple[str, str], float] = {}
    days: dict[tuple[int, str, str], list[float]] = {}
    for row in ended:
        assert row.released_at is not None
        whose = (row.owner_id, row.project_id)
        counts = row.billing * weighed(row.created_at, row.released_at, now, half_life)
        billed[whose] = billed.get(whose, 0.0) + counts
        for day, seconds in by_day(row.created_at, row.released_at):
            gpu_cpu = days.setdefault((day, *whose), [0.0, 0.0])
            gpu_cpu[0 if row.gpus else 1] += seconds * max(1, row.gpus)
        row.charged_at = now
    for (owner_id, project_id), seconds in sorted(billed.items()):
        known = _mine(session, UsageTotal, {"owner_id": owner_id, "project_id": project_id})
        known.billed = faded(known.billed, now - known.at, half_life) + seconds
        known.at = now
    for (day, owner_id, project_id), (gpu, cpu) in sorted(days.items()):
        of_day = _mine(session, UsageDay, {"day": day, "owner_id": owner_id, "project_id": project_id})
        of_day.gpu_seconds += gpu
        of_day.cpu_seconds += cpu
    return len(ended)


def by_day(began: float, ended: float) -> Iterator[tuple[int, float]]:
    """(day since 1970, seconds of it): a job that runs over midnight counts in both."""
    while began < ended:
        day = int(began // DAY)
        until = min(ended, (day + 1) * DAY)
        yield day, until - began
        began = until


def _mine(session: Session, table: type[Any], key: dict[str, Any]) -> Any:
    row = session.execute(select(table).filter_by(**key).with_for_update()).scalar_one_or_none()
    if row is None:
        session.execute(insert(table).values(**key))
        row = session.execute(select(table).filter_by(**key)).scalar_one()
    return row


# -- disk


def owners_of_runs(session: Session, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Job → (owner, project) of those that there are."""
    found: dict[str, tuple[str, str]] = {}
    for start in range(0, len(job_ids), 500):  # SQLite has a limit of parameters
        rows = session.execute(
            select(Job.id, Job.owner_id, Job.project_id).where(Job.id.in_(job_ids[start : start + 500]))
        )
        found.update({row.id: (row.owner_id, row.project_id) for row in rows})
    return found


def tell_disk(session: Session, runs: Mapping[tuple[str, str], int]) -> None:
    """`runs`: bytes of run folders by (owner, project). Uploaded files are added from their rows."""
    now = read_now(session)
    taken = dict(runs)
    query = select(File.owner_id, File.project_id, func.sum(File.bytes)).group_by(File.owner_id, File.project_id)
    for owner_id, project_id, count in session.execute(query):
        taken[owner_id, project_id] = taken.get((owner_id, project_id), 0) + int(count)
    for row in session.execute(select(UsageTotal)).scalars():
        taken.setdefault((row.owner_id, row.project_id), 0)
    for (owner_id, project_id), count in sorted(taken.items()):
        mine = _mine(session, UsageTotal, {"owner_id": owner_id, "project_id": project_id})
        if mine.disk_bytes != count or mine.disk_at is None:
            mine.disk_bytes, mine.disk_at = count, now


# -- the report


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Usage of an owner in a project over a range of days."""

    owner_id: str
    project_id: str
    gpu_hours: float
    cpu_hours: float
    running: int
    queued: int
    disk_bytes: int
    counted_hours: float
    """Hours of the owner in all projects, as fair share counts them now."""


def report(
    session: Session,
    first: int,
    last: int,
    project_id: str | None = None,
    half_life: float = HALF_LIFE_SECONDS,
) -> list[UsageRow]:
    """Days `first` to `last` since 1970, both included; what runs and waits is as of now. By owner and project.

    Time that is not charged yet (what runs, and what ended seconds ago) is counted in its days.
    """
    now = read_now(session)
    hours: dict[tuple[str, str], list[float]] = {}

    def count(whose: tuple[str, str], gpu: float, cpu: float) -> None:
        both = hours.setdefault(whose, [0.0, 0.0])
        both[0] += gpu / 3600
        both[1] += cpu / 3600

    charged = (
        select(UsageDay.owner_id, UsageDay.project_id, func.sum(UsageDay.gpu_seconds), func.sum(UsageDay.cpu_seconds))
        .where(UsageDay.day.between(first, last))
        .group_by(UsageDay.owner_id, UsageDay.project_id)
    )
    for owner, project, gpu, cpu in session.execute(charged):
        count((owner, project), gpu, cpu)
    spans = open_spans(session)
    counted = effective(booked(session), spans, now, half_life)
    for span in spans:
        for day, seconds in by_day(span.began, now if span.ended is None else span.ended):
            if first <= day <= last:
                whose = (span.owner_id, span.project_id)
                count(whose, seconds * span.gpus, 0.0 if span.gpus else seconds)
    states = (
        select(Job.owner_id, Job.project_id, Job.status, func.count())
        .where(Job.kind == "train", Job.status.not_in([status.value for status in FINAL]))
        .group_by(Job.owner_id, Job.project_id, Job.status)
    )
    running: dict[tuple[str, str], int] = {}
    queued: dict[tuple[str, str], int] = {}
    for owner, project, status, jobs in session.execute(states):
        into = queued if status in (Status.QUEUED, Status.PAUSED, Status.PREPARING) else running
        into[owner, project] = into.get((owner, project), 0) + jobs
    rows = session.execute(select(UsageTotal.owner_id, UsageTotal.project_id, UsageTotal.disk_bytes))
    disk = {(owner, project): count for owner, project, count in rows}
    known = sorted({*hours, *running, *queued, *(whose for whose, count in disk.items() if count)})
    found = []
    for owner, project in known:
        if project_id in (None, project):
            whose = (owner, project)
            gpu, cpu = hours.get(whose, [0.0, 0.0])
            at_work, waiting = running.get(whose, 0), queued.get(whose, 0)
            taken, counts = disk.get(whose, 0), counted.get(owner, 0.0) / 3600
            found.append(UsageRow(*whose, gpu, cpu, at_work, waiting, taken, counts))
    return found
