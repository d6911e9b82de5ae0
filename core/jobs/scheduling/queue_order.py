"""The order of the queue: claims take jobs from it, and explanations count positions in it.

A line is what has the same `queue_key`: the same needs, project, owner and priority; in it, age decides. The database
finds the lines by jumping through an index and the head of each by one look more, whatever waits behind them. Among the
heads `rank` decides: priority, then who has slots kept already (core/jobs/scheduling/gang_scheduling.py), then what the
owner has used by its shares (core/jobs/base/shares.py), then age. `QueueOrder.next` is whose turn it is; an
explanation calls it again and again and lets the state follow each choice as a claim would change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import ColumnElement, Select, func, or_, select, text
from sqlalchemy.orm import Session

from core.db.tables import BOUNDED, WAITS_FOR, Job
from core.jobs.base.shares import HALF_LIFE_SECONDS, SLICE_SECONDS, effective
from core.jobs.base.slots import Key, Slot
from core.jobs.kinds import Kind
from core.jobs.policies import usage
from core.jobs.policies.quotas import Quota, QuotaUsage, standing

PAGE = 50
DEPTH = 100
"""How far a line is searched for a job that fits into a gap: a look costs the same however many wait."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job that waits, as far as its turn depends on it."""

    id: str
    key: Key
    created_at: float
    bound: float | None = None
    """Longest time in seconds that it will hold its slots; None: unknown."""
    reserved_at: float | None = None
    """Since when slots are kept for it."""
    reserved_node: str | None = None


@dataclass(slots=True)
class Line:
    """One queue_key, oldest first: `seen` is read, `more` says that others may stand behind."""

    key: Key
    seen: list[Waiting]
    more: bool
    at: int = 0

    @property
    def head(self) -> Waiting:
        return self.seen[self.at]


Ready = Sequence[ColumnElement[bool]]
"""What a job must be beside waiting: its time has come, there is room for it, it ends before the node is serviced."""


def ready(now: float, room: int | None, ends_before: float | None) -> list[ColumnElement[bool]]:
    """`room`: bytes a job may take of the data root (None: not measured). `ends_before`: a job whose time is known
    (core/jobs/scheduling/runtime_estimates.py) and reaches beyond it is not started."""
    conditions = [due(now)]
    if room is not None:
        conditions.append(func.coalesce(Job.needs_bytes, 0) <= room)  # below 0 nothing is started
    if ends_before is not None:
        conditions.append(or_(Job.bound_seconds.is_(None), now + Job.bound_seconds <= ends_before))
    return conditions


def due(now: float) -> ColumnElement[bool]:
    return or_(Job.not_before.is_(None), Job.not_before <= now)


COLUMNS = (Job.id, Job.queue_key, Job.created_at, Job.bound_seconds, Job.reserved_at, Job.reserved_node)


def waiting(job: Job) -> Waiting:
    """A job as it stands in the queue."""
    return _waiting((job.id, job.queue_key, job.created_at, job.bound_seconds, job.reserved_at, job.reserved_node))


def _waiting(row: Any) -> Waiting:
    job_id, key, *rest = row
    return Waiting(job_id, Key.parse(key), *rest)


def heads(
    phase: Kind, conditions: Ready, within: float | None = None
) -> Select[str, str, float, float | None, float | None, str | None]:
    """COLUMNS of the oldest ready job of every line: a loose index scan, then a look a line.

    `within`: the oldest that is over so many seconds after its start, if it is among the first DEPTH of its line whose
    time is known.
    """
    waits = text(WAITS_FOR[phase] if within is None else BOUNDED)
    first = select(func.min(Job.queue_key)).where(waits).scalar_subquery()
    keys = select(first.label("key")).cte("keys", recursive=True)
    after = select(func.min(Job.queue_key)).where(waits, Job.queue_key > keys.c.key).correlate(keys).scalar_subquery()
    keys = keys.union_all(select(after).select_from(keys).where(keys.c.key.is_not(None)))
    line = select(Job.id, Job.created_at, Job.bound_seconds).where(waits, Job.queue_key == keys.c.key, *conditions)
    line = line.order_by(Job.created_at, Job.id).correlate(keys)
    if within is None:
        oldest = line.with_only_columns(Job.id).limit(1).scalar_subquery()
    else:
        few = line.limit(DEPTH).subquery("few")
        fitting = select(few.c.id).where(few.c.bound_seconds <= within)
        oldest = fitting.order_by(few.c.created_at, few.c.id).limit(1).scalar_subquery()
    found = select(oldest.label("id")).where(keys.c.key.is_not(None)).subquery("heads")
    return select(*COLUMNS).join(found, found.c.id == Job.id)


def _behind(
    session: Session, phase: Kind, key: str, conditions: Ready, after: Waiting | None, most: int
) -> list[Waiting]:
    query = select(*COLUMNS).where(text(WAITS_FOR[phase]), Job.queue_key == key, *conditions)
    if after is not None:
        same = (Job.created_at == after.created_at) & (Job.id > after.id)
        query = query.where(Job.created_at >= after.created_at, or_(Job.created_at > after.created_at, same))
    return [_waiting(row) for row in session.execute(query.order_by(Job.created_at, Job.id).limit(most))]


@dataclass(slots=True)
class QueueOrder:
    """All lines of a phase as of one moment. Read it in one transaction; nothing is written."""

    session: Session
    phase: Kind
    now: float
    conditions: Ready
    lines: list[Line]
    used: dict[str, float]
    """Owner → billed seconds as they count now."""
    standing: QuotaUsage
    admitted: dict[tuple[str, str], Admitted] = field(default_factory=dict)

    def rank(self, waiting: Waiting) -> tuple[float, float, float, float, str]:
        """Smallest first. This is the order of the queue: nothing else in the service compares two waiting jobs.

        Who had come to its turn and has slots kept stays first: what goes ahead of it meanwhile, and is charged to its
        owner, does not cost it its place.
        """
        key = waiting.key
        share = self.used.get(key.owner_id, 0.0) / self.standing.shares(key.owner_id)
        since = math.inf if waiting.reserved_at is None else waiting.reserved_at
        return -key.priority, since, share, waiting.created_at, waiting.id

    def next(self, fits: Callable[[Key], bool]) -> Waiting | None:
        """The job that a slot takes which serves the lines that `fits` names."""
        ranked = sorted((line.head for line in self.lines if fits(line.key)), key=self.rank)
        return next((waiting for waiting in ranked if self.held(waiting) is None), None)

    def held(self, waiting: Waiting) -> Quota | None:
        """The quota that keeps the job from being started; preparing and previews have none."""
        if self.phase != Kind.TRAIN:
            return None
        key = waiting.key
        quota = self.standing.used_up(key.owner_id, key.project_id)
        if quota is not None:
            return quota
        for whose in (("project", key.project_id), ("owner", key.owner_id)):
            if whose in self.admitted and (full := self.admitted[whose].refuses(waiting)) is not None:
                return full
        return None

    def take(self, waiting: Waiting, billing: float) -> None:
        """Let the state follow a claim of `waiting`, the head of its line, on slots that count `billing` each."""
        key = waiting.key
        (line,) = [line for line in self.lines if line.head is waiting]
        line.at += 1
        if line.at == len(line.seen) and line.more:
            page = _behind(self.session, self.phase, str(key), self.conditions, line.seen[-1], PAGE)
            line.seen, line.at, line.more = page, 0, len(page) == PAGE
        if line.at == len(line.seen):
            self.lines.remove(line)
        if self.phase == Kind.TRAIN:
            self.standing.take(key.owner_id, key.project_id)
            counts = billing * key.needs.gpus * SLICE_SECONDS
            self.used[key.owner_id] = self.used.get(key.owner_id, 0.0) + counts
        for admitted in self.admitted.values():
            admitted.gone.add(waiting.id)

    def bounded(self, within: float) -> QueueOrder:
        """The same moment, with those jobs alone that are over `within` seconds after their start."""
        rows = self.session.execute(heads(self.phase, self.conditions, within))
        # No job takes a second one from a line of it.
        lines = [Line(head.key, [head], more=False) for head in map(_waiting, rows)]
        return replace(self, lines=lines)

    def all(self, fits: Callable[[Key], bool], billing: float) -> Iterator[Waiting]:
        """In the order in which slots would take them if nothing else happened. The state is used up by it."""
        while (waiting := self.next(fits)) is not None:
            yield waiting
            self.take(waiting, billing)


@dataclass(slots=True)
class Admitted:
    """A quota of queued jobs: the first so many of a project or an owner, by priority and age, stand in the line."""

    quota: Quota
    first: list[str]
    gone: set[str] = field(default_factory=set)

    def refuses(self, waiting: Waiting) -> Quota | None:
        left = [job_id for job_id in self.first if job_id not in self.gone]
        return None if waiting.id in left[: int(self.quota.limit)] else self.quota


def look(
    session: Session,
    phase: Kind,
    now: float,
    conditions: Ready = (),
    *,
    half_life: float = HALF_LIFE_SECONDS,
    deep: int = 0,
) -> QueueOrder:
    """The order as it stands. `deep`: how many jobs will be taken from it."""
    spans = usage.open_spans(session)
    used = effective(usage.booked(session), spans, now, half_life)
    counts = standing(session, spans, now)
    lines = [_line(row) for row in session.execute(heads(phase, conditions))]
    order = QueueOrder(session, phase, now, conditions, lines, used, counts)
    if phase == Kind.TRAIN:
        for scope, subject_id, most in counts.queues():
            quota = Quota(scope, subject_id, "queued", most, most)
            order.admitted[scope, subject_id] = Admitted(quota, _first_of(session, scope, subject_id, most + deep))
    return order


def _line(row: Any) -> Line:
    head = _waiting(row)
    return Line(head.key, [head], more=True)


def _first_of(session: Session, scope: str, subject_id: str, most: int) -> list[str]:
    """Its first waiting jobs by priority and age, whatever they need and whether their models are there or not: by the
    lines, so that it costs as much as is asked for and not as much as waits."""
    found: list[tuple[int, float, str]] = []
    phases: tuple[Kind, ...] = (Kind.PREPARE, Kind.TRAIN)
    for phase in phases:
        for _, text_key, *_ in session.execute(heads(phase, ())):
            key = Key.parse(text_key)
            if (key.project_id if scope == "project" else key.owner_id) == subject_id:
                line = _behind(session, phase, text_key, (), None, most)
                found += [(-key.priority, waiting.created_at, waiting.id) for waiting in line]
    return [job_id for _, _, job_id in sorted(found)[:most]]


def serves(slot: Slot, peers: Sequence[Slot] = ()) -> Callable[[Key], bool]:
    """The lines that `slot` can serve, where `peers` are the slots of its node, busy or not."""
    alike = [one for one in peers if one.family == slot.family and one.id != slot.id]

    def fits(key: Key) -> bool:
        if key.needs.missing(slot):
            return False
        others = key.needs.width(slot.phase) - 1
        return others <= 0 or sum(not key.needs.missing(one) for one in alike) >= others

    return fits
