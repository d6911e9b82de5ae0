"""What waiting jobs say while the data root is full. It is one data root for all nodes, so one worker tells for all.

Their state does not change, so no event is written: with thousands waiting that would help to fill the disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, and_, case, or_, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Job
from core.jobs.base.states import Status
from core.jobs.policies.budget import Over

WAITS = "waits for room on the data root"
WAITS_FOR_MODEL = "waits for a worker to prepare its model"
WAITS_FOR_SLOT = "waits for a slot"

_SAYS_SO = Job.reason.startswith(WAITS)


def words(free: int, reserve: int, needs: int = 0, over: Sequence[Over] = ()) -> str:
    """`reserve` must stay free beside what a job `needs`; bytes. `over`: budgets that are used up."""
    if over:
        return f"{WAITS}: {'; '.join(one.words() for one in over)}"
    parts = f" ({_mib(needs)} for itself, {reserve >> 20} stay in reserve)" if needs else ""
    return f"{WAITS}: {free >> 20} MiB free, needs {_mib(needs + reserve)}{parts}"


def tell(session: Session, free: int, reserve: int, over: Sequence[Over] = ()) -> list[str]:
    """Bring the words of all waiting jobs up to date; ids of those that were waiting in other words. It reads, and
    writes only where something has changed: `session` is of a write transaction then (see `stale`)."""
    changed: list[str] = []
    for which, reason in _groups(session, free, reserve, over):
        done = session.execute(
            update(Job)
            .where(Job.status == Status.QUEUED.value, which)
            .values(reason=reason)
            .returning(Job.id)
            .execution_options(synchronize_session=False)
        )
        changed += done.scalars().all()
    return changed


def stale(session: Session, free: int, reserve: int, over: Sequence[Over] = ()) -> bool:
    """Whether `tell` would change anything: asked every few seconds, and mostly not the case."""
    return any(
        session.execute(select(Job.id).where(Job.status == Status.QUEUED.value, which).limit(1)).first() is not None
        for which, _ in _groups(session, free, reserve, over)
    )


def _groups(
    session: Session, free: int, reserve: int, over: Sequence[Over]
) -> list[tuple[ColumnElement[bool], str | ColumnElement[str]]]:
    """Which jobs should say what and do not. A figure that changes is no news for the many; a job that waits for a
    certain size shows what is free now, in MiB."""
    room = free - reserve
    particular = session.execute(
        select(Job.id, Job.needs_bytes).where(Job.status == Status.QUEUED.value, Job.needs_bytes > room)
    ).all()
    groups: list[tuple[ColumnElement[bool], str | ColumnElement[str]]] = []
    for row in particular:
        reason = words(free, reserve, row.needs_bytes)
        groups.append((and_(Job.id == row.id, Job.reason != reason), reason))
    others = or_(Job.needs_bytes.is_(None), Job.needs_bytes <= room)
    if room < 0:
        groups.append((and_(others, ~_SAYS_SO), words(free, reserve, over=over)))
    else:
        # A job with a retry time met a disk that was full in a way that free bytes do not show.
        due = or_(Job.not_before.is_(None), Job.not_before <= db_now())
        wait = case((Job.prepared.is_(None), WAITS_FOR_MODEL), else_=WAITS_FOR_SLOT)
        groups.append((and_(others, due, _SAYS_SO), wait))
    return groups


def _mib(count: int) -> int:
    """Rounded up: what is needed must not look smaller than what is free."""
    return -(-count >> 20)
