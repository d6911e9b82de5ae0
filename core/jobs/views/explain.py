"""Why a job waits, how many are before it, and about when it will start.

Positions are counted by the claim's own choice (core/jobs/scheduling/queue_order.py): for every kind of slot there is,
its next job and the one after that, until the job in question comes. What keeps a job out of the line is asked of the
functions that a claim asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from core.db.engine import read_now
from core.db.tables import WAITS_FOR, Job
from core.jobs.admission import auto_method, dependencies
from core.jobs.base.shares import HALF_LIFE_SECONDS
from core.jobs.base.slots import Key, Slot
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.kinds import WAITING_KINDS, Kind
from core.jobs.policies import disk_room as room
from core.jobs.policies.budget import NO_BUDGET, Budget, Over
from core.jobs.policies.quotas import names
from core.jobs.policies.times import clock
from core.jobs.scheduling import cluster, gang_scheduling, preempt, queue_order
from core.jobs.scheduling.cluster import SlotState
from core.jobs.views.forecast import EstimatedStart, Forecast

Code = Literal["turn", "model", "requirements", "closed", "quota", "maintenance", "disk", "later", "no_worker", "after"]
MOST = 1000
"""Jobs that are counted in a line; further back, the exact place does not matter."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one job waits, its place in the queue, and when it may start."""

    job: Job
    key: Key
    phase: Kind
    position: int | None
    """In the line of the slots that can serve it; None: it is not in line, or more than MOST are before it."""
    code: Code
    """turn: others are before it, or all slots are busy; closed: slots are held, drained, silent or used by others."""
    reason: str
    estimated_start: float | None
    estimated_gpus: tuple[str, ...] = ()
    """Labels of the slots on which it may start then; the first one has rank 0."""
    aside: str | None = None
    """Further notes for its own project: for whom it made room, or that others make room for it."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What an installation is set up with, as far as the queue depends on it."""

    silent_after: float
    """Seconds without a heartbeat after which a node counts as silent."""
    free: int | None = None
    """Free bytes of the data root; None: unknown."""
    reserve: int = 0
    half_life: float = HALF_LIFE_SECONDS
    budget: Budget = NO_BUDGET
    over: Sequence[Over] = ()
    """Budgets of the data root that are used up; `free` is then so much less than the reserve."""
    leave_seconds: float = gang_scheduling.LEAVE_SECONDS
    """How long after its time limit a job may still hold its slots."""

    @property
    def room(self) -> int | None:
        return None if self.free is None else self.free - self.reserve


def queue(session: Session, settings: QueueSettings, limit: int = 100) -> list[Explanation]:
    """What waits: those in line first, by their positions, then what is held; at most `limit` of each phase.

    Training stands before preparing. Previews are not listed: they do not wait in this line.
    """
    explainer = QueueExplainer(session, settings)
    phases: tuple[Kind, ...] = (Kind.TRAIN, Kind.PREPARE)
    return [one for phase in phases for one in explainer.explain(phase, limit)]


def beyond(session: Session, told: Sequence[Explanation], limit: int) -> int:
    """Count the jobs that wait beyond those that `queue` listed, up to `limit` of each phase, in this transaction."""
    more = 0
    for phase, prepared in ((Kind.TRAIN, True), (Kind.PREPARE, False)):
        shown = sum((one.job.prepared is not None) is prepared for one in told)
        if shown >= limit:
            counted = select(func.count()).select_from(Job).where(text(WAITS_FOR[phase]))
            more += session.execute(counted).scalar_one() - shown
    return more


def job(session: Session, settings: QueueSettings, waiting: Job) -> Explanation | None:
    """Explain one job as read in this transaction; None if it does not wait."""
    if waiting.status != Status.QUEUED.value:
        return None
    phase = Kind.PREPARE if waiting.prepared is None else Kind.TRAIN
    if waiting.kind not in WAITING_KINDS:
        phase = Kind(waiting.kind)
    return QueueExplainer(session, settings).explain_one(phase, waiting)


class QueueExplainer:
    """One reading of the whole state."""

    def __init__(self, session: Session, settings: QueueSettings) -> None:
        self._session, self._settings = session, settings
        self.now = read_now(session)
        self._seats = cluster.slot_states(session, self.now, settings.silent_after)
        self._running = cluster.running(session, self._seats)
        self._forecast = Forecast(session, self.now, self._seats, self._running, settings.leave_seconds)
        self._order: queue_order.QueueOrder | None = None
        self._kept_for: dict[tuple[str, str], gang_scheduling.Reservation] | None = None
        self._ends: list[queue_order.QueueOrder] = []
        """The order after the last counted position, for each kind of slot whose remaining jobs are all held."""

    def explain(self, phase: Kind, limit: int) -> list[Explanation]:
        positions = self._positions(phase, limit)
        in_line = sorted(positions, key=lambda job_id: positions[job_id])[:limit]
        jobs = self._jobs(in_line)
        rows: list[tuple[Job, int | None]] = [(jobs[job_id], positions[job_id]) for job_id in in_line]
        if len(rows) < limit:  # else the lines go on, and nobody has asked who is in none
            rows += [(row, None) for row in self._others(phase, positions, limit - len(rows))]
        in_turn = [row for row, position in rows if position is not None]
        starts = self._forecast.starts(in_turn) if phase == Kind.TRAIN else {}
        return [self._words(phase, row, position, starts.get(row.id)) for row, position in rows]

    def explain_one(self, phase: Kind, row: Job) -> Explanation:
        positions = self._positions(phase, MOST, until=row.id)
        position = positions.get(row.id)
        start = None
        if position is not None and phase == Kind.TRAIN:
            ahead = sorted((job_id for job_id in positions), key=lambda job_id: positions[job_id])
            jobs = self._jobs(ahead)
            start = self._forecast.starts([jobs[job_id] for job_id in ahead if job_id in jobs]).get(row.id)
        return self._words(phase, row, position, start)

    # -- positions

    def _fitting(self, phase: Kind, key: Key) -> list[SlotState]:
        return [
            seat
            for seat in self._seats
            if seat.slot.phase == phase and queue_order.serves(seat.slot, self._peers(seat.node))(key)
        ]

    def _peers(self, node: str) -> list[Slot]:
        return [seat.slot for seat in self._seats if seat.node == node and seat.slot.phase == Kind.TRAIN]

    def _positions(self, phase: Kind, most: int, until: str | None = None) -> dict[str, int]:
        """Positions of the first `most` waiting jobs per kind of slot; a job that several kinds serve has its best one.

        With `until`, counting stops at that job.
        """
        found: dict[str, int] = {}
        self._ends = []
        for fits, billing, ends_before in self._kinds(phase):
            conditions = queue_order.ready(self.now, self._settings.room, ends_before if phase == Kind.TRAIN else None)
            order = queue_order.look(
                self._session, phase, self.now, conditions, half_life=self._settings.half_life, deep=most
            )
            for position, waiting in enumerate(order.all(fits, billing), 1):
                found[waiting.id] = min(position, found.get(waiting.id, position))
                if position == most or waiting.id == until:
                    break
            else:
                self._ends.append(order)
        return found

    def _kinds(self, phase: Kind) -> list[tuple[Callable[[Key], bool], float, float | None]]:
        """Slots that serve the same jobs choose alike: one of each kind. Without any, what would be the line."""
        kinds: dict[tuple[object, ...], tuple[Callable[[Key], bool], float, float | None]] = {}
        here = [seat for seat in self._seats if seat.slot.phase == phase]
        # A box that has gone promises nothing, unless there are no others.
        for seat in [seat for seat in here if not seat.gone] or here:
            slot, peers = seat.slot, self._peers(seat.node)
            beside = tuple(sorted((one.family, one.memory_bytes, one.share_bytes) for one in peers))
            memory = (slot.memory_bytes, slot.share_bytes, slot.host_bytes)
            mark = (slot.family, memory, slot.labels, beside, seat.ends_before)
            kinds[mark] = (queue_order.serves(slot, peers), slot.billing, seat.ends_before)
        return list(kinds.values()) or [(lambda key: True, 1.0, None)]

    def _jobs(self, ids: Sequence[str]) -> dict[str, Job]:
        found: dict[str, Job] = {}
        for start in range(0, len(ids), 500):  # SQLite has a limit of parameters
            rows = self._session.execute(select(Job).where(Job.id.in_(ids[start : start + 500]))).scalars()
            found.update({row.id: row for row in rows})
        return found

    def _others(self, phase: Kind, known: Iterable[str], limit: int) -> list[Job]:
        """What waits and is in no line, oldest first."""
        in_line = set(known)
        query = select(Job).where(Job.status == Status.QUEUED.value, Job.kind.in_(WAITING_KINDS))
        query = query.where(Job.prepared.is_(None) if phase == Kind.PREPARE else Job.prepared.is_not(None))
        rows = self._session.execute(query.order_by(Job.created_at, Job.id).limit(len(in_line) + limit)).scalars()
        return [row for row in rows if row.id not in in_line][:limit]

    # -- words

    def _words(self, phase: Kind, row: Job, position: int | None, start: EstimatedStart | None) -> Explanation:
        key = Key.parse(row.queue_key)
        code, reason = self._why(phase, row, key, position)
        at, on = (None, ()) if start is None else (start.at, tuple(self._seats[seat].label for seat in start.seats))
        return Explanation(row, key, phase, position, code, reason, at, on, self._aside(row))

    def _aside(self, row: Job) -> str | None:
        if row.preempted is not None:
            when = clock(row.preempted["at"], self.now)
            return f"made room at {when}: {preempt.words(row.preempted, row.project_id)}"
        leaving = [
            job
            for job in self._running.values()
            if job.stop_requested == StopReason.PREEMPT and job.preempted is not None and job.preempted["job"] == row.id
        ]
        if not leaving:
            return None
        count = "1 running job of a lower priority makes" if len(leaving) == 1 else f"{len(leaving)} running jobs make"
        return f"{count} room for it"

    def _why(self, phase: Kind, row: Job, key: Key, position: int | None) -> tuple[Code, str]:
        if row.unmet:
            return "after", dependencies.words(self._session, row.id)
        left = self._settings.room
        if left is not None and self._settings.free is not None and (left < 0 or (row.needs_bytes or 0) > left):
            return "disk", room.words(
                self._settings.free, self._settings.reserve, row.needs_bytes or 0, self._settings.over
            )
        if row.not_before is not None and row.not_before > self.now:
            return "later", f"{row.reason}; next retry at {clock(row.not_before, self.now)}"
        seats = self._fitting(phase, key)
        if not [seat for seat in self._seats if seat.state != "silent"]:
            return "no_worker", "no worker is running: start one with `eft worker` (`eft worker list` shows them)"
        if not seats and phase == Kind.TRAIN:
            return "requirements", self._unmet(row, key)
        turn = f"; {ordinal(position)} in line" if position is not None else ""
        if (
            phase == Kind.PREPARE
            and not self._fitting(Kind.TRAIN, key)
            and any(s.slot.phase == Kind.TRAIN for s in self._seats)
        ):
            return "requirements", f"{self._unmet(row, key)}; its model is prepared meanwhile"
        if phase != Kind.TRAIN:
            return "model", f"{room.WAITS_FOR_MODEL}{turn}"
        held = self._out_of_line(row, key, seats, turn)
        if held is not None:
            return held
        place = f"more than {MOST} jobs are before it" if position is None else f"{ordinal(position)} in line"
        where = self._nearest(row, key, seats)
        notes = [f"{seat.label} {seat.closed}" for seat in where if seat.closed is not None]
        closed, free = len(notes), sum(seat.free for seat in where)
        notes += self._reserved(row, where)
        count = f"{free} of {len(where)} free"
        if key.needs.gpus > 1 and len({seat.node for seat in seats}) > 1:
            count += f" on {where[0].node}"
        if notes:
            count += f" ({'; '.join(notes[:3])}{f'; {len(notes) - 3} more' if len(notes) > 3 else ''})"
        # The news first: a narrow table cuts the end off.
        reason = f"{place}; {count}; needs {key.needs.words(self._memory(row, key))}"
        return "closed" if closed > len(where) - key.needs.gpus else "turn", reason

    def _nearest(self, row: Job, key: Key, seats: Sequence[SlotState]) -> Sequence[SlotState]:
        """All that could serve it; for a job of several those of the node and kind where the most are open and free, or
        where slots are kept for it already."""
        if key.needs.gpus == 1:
            return seats
        groups: dict[tuple[str, tuple[str, str, str]], list[SlotState]] = {}
        for seat in seats:
            groups.setdefault((seat.node, seat.slot.family), []).append(seat)
        mine = {where for where, kept in self._kept().items() if kept.waiting.id == row.id}

        def nearness(group: list[SlotState]) -> tuple[int, int, int]:
            kept = sum((seat.node, seat.slot.id) in mine for seat in group)
            return kept, sum(seat.free for seat in group), sum(seat.closed is None for seat in group)

        return max(groups.values(), key=nearness)

    def _reserved(self, row: Job, seats: Sequence[SlotState]) -> list[str]:
        """What is free and left to a job that needs more."""
        notes = []
        for seat in seats:
            kept = self._kept().get((seat.node, seat.slot.id))
            if kept is None or not seat.free:
                continue
            if kept.waiting.id == row.id:
                notes.append(f"{seat.label} kept for it")
                continue
            start = kept.group.start
            until = f" until {clock(start, self.now)}" if start is not None and start > self.now else ""
            notes.append(f"{seat.label} kept{until} for a job of {kept.waiting.key.needs.gpus}")
        return notes

    def _kept(self) -> dict[tuple[str, str], gang_scheduling.Reservation]:
        """What a claim would say of every free slot: for whom it is kept."""
        if self._kept_for is None:
            self._kept_for = {}
            state = gang_scheduling.cluster_state_of(self._session, self.now, self._seats)
            for seat in state.seats:
                if not seat.free:
                    continue
                conditions = queue_order.ready(self.now, self._settings.room, seat.ends_before)
                half_life = self._settings.half_life
                deep = gang_scheduling.MOST_KEPT
                order = queue_order.look(
                    self._session, Kind.TRAIN, self.now, conditions, half_life=half_life, deep=deep
                )
                if not any(one.key.needs.gpus > 1 for one in order.lines):
                    break
                beside = [one.slot for one in state.seats if one.node == seat.node and one.free]
                leave = self._settings.leave_seconds
                for kept in gang_scheduling.choose(order, seat.node, seat.slot, beside, lambda: state, leave).kept:
                    for number in kept.group.seats:
                        place = state.seats[number]
                        self._kept_for.setdefault((place.node, place.slot.id), kept)
        return self._kept_for

    def _out_of_line(self, row: Job, key: Key, seats: Sequence[SlotState], turn: str) -> tuple[Code, str] | None:
        """Why no slot takes it though some could; None where one will as soon as those before it are gone."""
        if self._order is None:
            self._order = queue_order.look(self._session, Kind.TRAIN, self.now, half_life=self._settings.half_life)
        waiting = queue_order.Waiting(row.id, key, row.created_at)
        quota = self._order.held(waiting)
        if quota is not None:
            return "quota", quota.words(names(self._session, [quota.subject_id])) + turn
        if turn:
            return None
        for order in self._ends:
            if order.phase == Kind.TRAIN and (quota := order.held(waiting)) is not None:
                words = quota.words(names(self._session, [quota.subject_id]))
                return "quota", f"{words} once those before it have started"
        for seat in seats:
            if seat.ends_before is not None:
                when = clock(seat.ends_before, self.now)
                if row.bound_seconds is not None:
                    limit = row.spec["resources"].get("max_runtime_seconds")
                    takes = f"time limit ({duration(limit)})" if limit is not None else "own pace"
                    return "maintenance", f"its {takes} reaches into the maintenance of {seat.node} at {when}"
        return None

    def _memory(self, row: Job, key: Key) -> str:
        """Name the memory the job takes if an otherwise suitable slot has too little; else return an empty string."""
        takes = key.needs.plan
        if takes is None:
            return ""
        asks = replace(key.needs, plan=None)
        slots = [seat.slot for seat in self._seats if seat.slot.phase == Kind.TRAIN and not asks.missing(seat.slot)]
        small = [slot for slot in slots if takes.missing(slot)]
        if not small:
            return ""
        largest = max(small, key=lambda slot: slot.device_bytes)
        return takes.words(largest, auto_method.planned_bytes(self._session, row, largest))

    def _unmet(self, row: Job, key: Key) -> str:
        """Which slot comes nearest, and what it lacks."""
        there = [seat for seat in self._seats if seat.slot.phase == Kind.TRAIN]
        needs = key.needs.words(self._memory(row, key))
        if not there:
            return f"needs {needs}; there is no slot for training here"
        able = [seat for seat in there if not key.needs.missing(seat.slot)]
        if able:
            counts = Counter((seat.node, seat.slot.family) for seat in able)
            (node, _), most = min(counts.items(), key=lambda item: (-item[1], item[0]))
            return f"needs {needs} of one node; the most that one has is {most} ({node})"
        nearest = min(there, key=lambda seat: len(key.needs.missing(seat.slot)))
        lacks = " and ".join(key.needs.missing(nearest.slot))
        return f"needs {needs}; none of the {len(there)} slots here has it ({nearest.label} lacks {lacks})"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th …"""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def duration(seconds: float) -> str:
    """`45 s`, `20 min`, `2 h`, `1.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
