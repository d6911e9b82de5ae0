"""The books of usage: what slots were held, charged to their owners once they are free again.

A row of `allocations` is the truth, with those of `slot_guests` where sessions have shared the process on a slot. The
leading housekeeper folds those that have ended into `usage` (faded, for fair share) and `usage_days` (plain, for quotas
and the report) and marks them, in one transaction; until then every reader counts them from their rows, so that nothing
waits for the books.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, insert, select
from sqlalchemy.orm import Session

from core.db.engine import read_now
from core.db.tables import Allocation, File, Job, SlotGuest, UsageDay, UsageTotal
from core.jobs.base.shares import (
    HALF_LIFE_SECONDS,
    Booked,
    GuestSpan,
    UsageSpan,
    effective,
    faded,
    shared_out,
    weighed,
)
from core.jobs.base.states import FINAL, Status

DAY = 86_400
_DUE = Allocation.charged_at.is_(None) & Allocation.released_at.is_not(None)
_ORDER = (Allocation.job_id, Allocation.attempt, Allocation.slot)


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
    columns = [getattr(Allocation, name) for name in HELD]
    uncharged = Allocation.charged_at.is_(None)
    rows = session.execute(select(*columns).where(uncharged).order_by(*_ORDER)).all()
    return divided(session, rows, uncharged)


HELD = ("job_id", "attempt", "owner_id", "project_id", "created_at", "released_at", "billing", "gpus")
"""Columns of `allocations` that `divided` reads."""


def divided(session: Session, held: Iterable[Any], which: ColumnElement[bool]) -> list[UsageSpan]:
    """Make spans of slots that were held (rows with HELD), divided where sessions have shared a process. `which`: a
    condition on `allocations` that all of the rows meet."""
    query = select(SlotGuest).join(
        Allocation,
        (Allocation.job_id == SlotGuest.host_id) & (Allocation.attempt == SlotGuest.host_attempt) & which,
    )
    guests: dict[tuple[str, int], list[GuestSpan]] = {}
    for row in session.execute(query.order_by(SlotGuest.job_id, SlotGuest.attempt)).scalars():
        span = GuestSpan(row.owner_id, row.project_id, (row.job_id, row.attempt), row.began_at, row.ended_at)
        guests.setdefault((row.host_id, row.host_attempt), []).append(span)
    found: list[UsageSpan] = []
    for one in held:
        attempt = (one.job_id, one.attempt)
        whole = UsageSpan(
            one.owner_id, one.project_id, one.created_at, one.released_at, one.billing, one.gpus, attempt=attempt
        )
        found += shared_out(whole, guests[attempt]) if attempt in guests else [whole]
    return found


def due(session: Session) -> bool:
    """Whether `charge` would find anything: asked every few seconds, and mostly not the case."""
    query = select(Allocation.job_id).where(_DUE)
    return session.execute(query.limit(1)).first() is not None


def charge(session: Session, half_life: float = HALF_LIFE_SECONDS, limit: int = 500) -> int:
    """Charge what has ended, at most `limit` rows a transaction. Returns how many; call again while it is `limit`."""
    query = select(Allocation).where(_DUE).order_by(*_ORDER).limit(limit)
    query = query.with_for_update(skip_locked=True)  # two that believe to lead: each row is charged once
    return _book(session, session.execute(query).scalars().all(), half_life)


def charge_job(session: Session, job_id: str, half_life: float = HALF_LIFE_SECONDS) -> int:
    """The same for one job, whose rows are about to go."""
    query = select(Allocation).where(_DUE, Allocation.job_id == job_id).order_by(*_ORDER).with_for_update()
    return _book(session, session.execute(query).scalars().all(), half_life)


def _book(session: Session, ended: Sequence[Allocation], half_life: float) -> int:
    if not ended:
        return 0
    now = read_now(session)
    billed: dict[tuple[str, str], float] = {}
    days: dict[tuple[int, str, str], list[float]] = {}
    for span in divided(session, ended, _DUE):
        assert span.ended is not None
        whose = (span.owner_id, span.project_id)
        counts = span.part * span.billing * weighed(span.began, span.ended, now, half_life)
        billed[whose] = billed.get(whose, 0.0) + counts
        for day, seconds in by_day(span.began, span.ended):
            gpu_cpu = days.setdefault((day, *whose), [0.0, 0.0])
            gpu_cpu[0 if span.gpus else 1] += span.part * seconds * max(1, span.gpus)
    for row in ended:
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
                count(whose, span.part * seconds * span.gpus, 0.0 if span.gpus else span.part * seconds)
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
