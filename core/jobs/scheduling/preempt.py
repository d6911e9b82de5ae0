"""Running jobs make room for waiting ones of a higher priority, where their project allows it (limits.preemptible).
A serving makes room for any job, at once.

Who is asked writes a checkpoint, leaves, waits in the queue again and goes on from there, bit for bit, as after a hold
or a drain. Nobody is asked in vain, nor more than are needed: only where the waiting job starts once they are gone, and
of all such sets the one that costs least. Each run trains for a minimum time before it can be asked, so that whoever
makes room again and again still gets on; and since priorities only go one way, no two can drive each other out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, or_, select, text
from sqlalchemy.orm import Session

from core.db.tables import WAITS_FOR, Attempt, Job, Limit
from core.jobs.base.scheduler_lock import lock_scheduler
from core.jobs.base.shares import HALF_LIFE_SECONDS
from core.jobs.base.slots import Key, Needs
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import append_events, move
from core.jobs.kinds import ON_TRAINING_SLOTS, Kind
from core.jobs.policies import audit
from core.jobs.scheduling import gang_scheduling, queue_order, runtime_estimates
from core.jobs.scheduling.gang_scheduling import ClusterState
from core.jobs.scheduling.queue_order import Waiting
from core.settings import Settings

FOR_A_JOB = "a job needs its slot; the next request brings it back"
"""Why a serving leaves."""


@dataclass(frozen=True, slots=True)
class PreemptionSettings:
    """What an installation is set up with."""

    min_seconds: float
    """Minimum run time after the attempt's first step before it can be preempted, seconds."""
    silent_after: float
    """Seconds without a heartbeat after which a node counts as silent."""
    room: int | None = None
    """Bytes that a job may take of the data root; None: not measured."""
    half_life: float = HALF_LIFE_SECONDS
    leave_seconds: float = gang_scheduling.LEAVE_SECONDS
    """A job that will end within this many seconds is not preempted."""

    @classmethod
    def of(cls, settings: Settings, room: int | None) -> PreemptionSettings:
        return cls(
            settings.preempt_min_seconds,
            settings.lease_seconds,
            room,
            settings.fairshare_half_life_hours * 3600.0,
            settings.stop_grace_seconds + settings.gpu_clear_seconds,
        )


@dataclass(frozen=True, slots=True)
class Preemption:
    """A waiting job and the running jobs that were asked to make room for it."""

    waiting: str
    victims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Victim:
    """A running job that may be asked."""

    job: Job
    seats: frozenset[int]
    trained: float
    """Seconds of this attempt."""


def possible(session: Session) -> bool:
    """Whether `ask` could find anybody: looked at every few seconds, and mostly not the case."""
    allowed = select(Limit.subject_id).where(Limit.scope == "project", Limit.preemptible.is_(True))
    may = or_(Job.project_id.in_(allowed), Job.kind == Kind.SERVING)
    running = select(Job.priority).where(Job.status == Status.RUNNING.value, may).subquery()
    waits = exists().where(text(WAITS_FOR[Kind.TRAIN]), Job.priority > running.c.priority)
    return session.execute(select(running.c.priority).where(waits).limit(1)).first() is not None


def ask(session: Session, rules: PreemptionSettings) -> list[Preemption]:
    """Ask those to leave who keep jobs of a higher priority waiting, in the order of the queue. Call in a write
    transaction of its own."""
    now = lock_scheduler(session)
    state = gang_scheduling.cluster_state(session, now, rules.silent_after)
    victims = _victims(session, state, rules)
    order = queue_order.look(
        session,
        Kind.TRAIN,
        now,
        queue_order.ready(now, rules.room, None),
        half_life=rules.half_life,
        deep=len(state.seats),
    )
    free = {number: at for number, at in state.free_at.items() if at is not None and at <= now}
    taken: set[int] = set()
    """Seats that those before in the line have, or will have."""
    passed: set[Needs | Key] = set()
    done = []
    while victims and (waiting := order.next(lambda key: not {key, key.needs} & passed)) is not None:
        needs = waiting.key.needs
        if waiting.key.priority <= min(victim.job.priority for victim in victims.values()):
            break
        at_once = gang_scheduling.gather(state.seats, free, needs, taken, takes=waiting.bound)
        later = gang_scheduling.gather(
            state.seats, state.free_at, needs, taken, takes=waiting.bound, stay=waiting.reserved_node
        )
        if at_once is not None:
            taken.update(at_once.seats)  # it starts now, or as soon as those have left who were asked before
        elif (found := _cheapest(state, waiting, victims, taken)) is not None:
            chosen, seats = found
            for job_id in chosen:
                _ask(session, victims.pop(job_id).job, waiting, now)
            done.append(Preemption(waiting.id, chosen))
            taken.update(seats)
        elif later is not None and needs.gpus > 1:
            taken.update(later.seats)  # kept for it: later jobs find their room elsewhere
        else:
            passed.add(waiting.key if gang_scheduling.closes_too_soon(state.seats, waiting) else needs)
            continue
        order.take(waiting, 1.0)
    for one in done:
        _tell_who_waits(session, one, now)
    return done


def _victims(session: Session, state: ClusterState, rules: PreemptionSettings) -> dict[str, _Victim]:
    """By job, those that may be asked now."""
    seats: dict[str, set[int]] = {}
    for number, seat in enumerate(state.seats):
        if seat.busy is not None:
            seats.setdefault(seat.busy, set()).add(number)
    rows = session.execute(
        select(Job, Attempt.training_at)
        .join(Attempt, (Attempt.job_id == Job.id) & (Attempt.attempt == Job.attempt))
        .outerjoin(Limit, (Limit.scope == "project") & (Limit.subject_id == Job.project_id))
        .where(
            or_(
                Limit.preemptible.is_(True) & (Attempt.training_at <= state.now - rules.min_seconds),
                Job.kind == Kind.SERVING,
            ),
            Job.status == Status.RUNNING.value,
            Job.stop_requested.is_(None),
            Attempt.kind.in_(ON_TRAINING_SLOTS),
        )
        .order_by(Job.id)
    ).all()
    to_go = runtime_estimates.of_running(session, [job for job, _ in rows], state.now)
    found = {}
    for job, training_at in rows:
        over = to_go[job.id].expected
        if job.id in seats and (over is None or over > rules.leave_seconds):
            found[job.id] = _Victim(job, frozenset(seats[job.id]), state.now - (training_at or state.now))
    return found


def _cheapest(
    state: ClusterState, waiting: Waiting, victims: Mapping[str, _Victim], taken: set[int]
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Jobs to preempt so that `waiting` starts, and the seats that it will have; None: preemption would not help.

    Lower priorities before higher ones; then as few slots, as few jobs, and as short runs as possible.
    """
    needs = waiting.key.needs
    best: tuple[tuple[Any, ...], tuple[str, ...], tuple[int, ...]] | None = None
    there: dict[tuple[str, tuple[str, str, str]], list[int]] = {}
    for number in sorted(state.free_at):
        seat = state.seats[number]
        if number not in taken and not needs.missing(seat.slot):
            there.setdefault((seat.node, seat.slot.family), []).append(number)
    for where, numbers in there.items():
        closes = state.seats[numbers[0]].ends_before
        if closes is not None and waiting.bound is not None and state.now + waiting.bound > closes:
            continue  # it would not be started there
        free = [number for number in numbers if (at := state.free_at[number]) is not None and at <= state.now]
        lower = [one for one in victims.values() if one.job.priority < waiting.key.priority]
        for level in sorted({one.job.priority for one in lower}):
            if best is not None and level > best[0][0]:
                break
            allowed = [one for one in lower if one.job.priority <= level]
            found = _cover(allowed, set(numbers), needs.gpus - len(free))
            if found is None:
                continue
            cost, chosen = found
            gained = {number for job_id in chosen for number in victims[job_id].seats} & set(numbers)
            seats = tuple(sorted([*free, *sorted(gained)][: needs.gpus]))
            if best is None or (level, *cost, *where) < best[0]:
                best = (level, *cost, *where), chosen, seats
            break
    return None if best is None else (best[1], best[2])


Cost = tuple[int, int, float, tuple[str, ...]]
"""Slots that stop, jobs, seconds trained, and the jobs themselves, so that equals have an order."""


def _cover(victims: Sequence[_Victim], numbers: set[int], need: int) -> tuple[Cost, tuple[str, ...]] | None:
    """The set of least cost that frees `need` of the seats `numbers`: a knapsack over the slots gained."""
    best: dict[int, Cost] = {0: (0, 0, 0.0, ())}
    for victim in victims:
        gain = len(victim.seats & numbers)
        if not gain:
            continue
        for gained, cost in sorted(best.items(), reverse=True):
            slots, jobs, trained, names = cost
            more = (slots + len(victim.seats), jobs + 1, trained + victim.trained, (*names, victim.job.id))
            reached = min(need, gained + gain)
            if reached not in best or more < best[reached]:
                best[reached] = more
    if need not in best or need <= 0:
        return None
    return best[need], best[need][3]


def _ask(session: Session, job: Job, waiting: Waiting, now: float) -> None:
    if job.kind == Kind.SERVING:
        move(session, job, Status.PAUSING, reason=FOR_A_JOB, values={"stop_requested": StopReason.PREEMPT})
        return
    key = waiting.key
    preempted = {"job": waiting.id, "project": key.project_id, "priority": key.priority, "at": now}
    guards = [Job.status == Status.RUNNING.value, Job.attempt == job.attempt, Job.stop_requested.is_(None)]
    told = {"by": waiting.id if key.project_id == job.project_id else None, "priority": key.priority}
    told["message"] = f"asked to write a checkpoint and make room: {words(preempted, job.project_id)}"
    values = {"stop_requested": StopReason.PREEMPT, "preempted": preempted}
    if append_events(session, job, guards, [("preempted", now, told)], values):
        data = {"priority": key.priority, "priority_of_job": job.priority, "attempt": job.attempt}
        audit.record(session, None, "job.preempt", job.id, {**data, "by": told["by"]}, project_id=job.project_id)
        if told["by"] is None:  # the project may not know who, an admin of the box may
            audit.record(session, None, "job.preempt", job.id, {**data, "by": waiting.id}, project_id=None)
    session.expire(job)


def _tell_who_waits(session: Session, one: Preemption, now: float) -> None:
    job = session.get_one(Job, one.waiting)
    theirs = session.execute(select(Job.id).where(Job.id.in_(one.victims), Job.project_id == job.project_id)).scalars()
    count = len(one.victims)
    message = f"{count} running job{'s' if count > 1 else ''} of a lower priority make{'' if count > 1 else 's'} room"
    append_events(session, job, [], [("preempts", now, {"jobs": sorted(theirs), "count": count, "message": message})])
    session.expire(job)


def words(preempted: Mapping[str, Any], project_id: str) -> str:
    """Why a job of this project was asked to leave; another project's jobs are not named."""
    by = preempted["job"] if preempted["project"] == project_id else "a job of another project"
    return f"{by} has priority {preempted['priority']}"
