"""Claim, lease, fencing token: how a job gets a worker and never two.

A claim is one guarded update that counts the attempt; the attempt's number is the token that every later write of
that worker carries. Lease times are computed and compared by the database's clock alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sqlalchemy import func, insert, null, select, update
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError
from sqlalchemy.orm import Session

from core.db.engine import db_now, read_now
from core.db.tables import Allocation, Attempt, Job, Node, SlotGuest
from core.jobs.admission import auto_method, fit, lengths, oom_backoff, shapes
from core.jobs.base.scheduler_lock import lock_scheduler
from core.jobs.base.shares import HALF_LIFE_SECONDS
from core.jobs.base.slots import Key, Slot
from core.jobs.base.states import Status
from core.jobs.base.transitions import Token, move
from core.jobs.kinds import CHILDREN, WAITING_KINDS, Kind
from core.jobs.policies import holds
from core.jobs.scheduling import gang_scheduling, queue_order, runtime_estimates
from core.spec.job import JobSpec

__all__ = ["Claim", "Slot", "Unclaimable", "claim"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a worker has won: the job as it is now, and the token to write with."""

    token: Token
    kind: Kind
    slots: tuple[Slot, ...]
    """In the order of their node; all of one kind, vendor and architecture. Rank 0 runs on the first."""
    owner_id: str
    project_id: str
    spec: dict[str, Any]
    prepared: dict[str, Any] | None
    resume_from: list[dict[str, Any]]
    """Earlier jobs that it is a retry of, oldest first: {"job", "attempts"}."""
    adjusted: dict[str, int]
    """Fields of the spec that were changed for want of memory (core/jobs/admission/oom_backoff.py)."""
    settled: dict[str, Any] | None
    """What `method: auto` came to (core/jobs/admission/auto_method.py)."""
    spent_seconds: float
    """What earlier attempts at training took, by the database's clock."""
    chain: dict[str, Any] | None
    """What a model of `type: job` is made of (core/spec/run/chain.py)."""
    lineage: list[dict[str, Any]] | None
    """The jobs behind it, nearest first."""
    reward_models: list[dict[str, Any]] | None
    """What reward models of its rewards are made of (core/spec/run/chain.py, RewardModelPin)."""
    request_id: str | None
    """Id of the request that submitted the job; ties a worker's log to the API's."""

    @property
    def slot(self) -> Slot:
        return self.slots[0]

    @property
    def label(self) -> str:
        """The job in a line of a log."""
        return f"{self.token.job_id} [{self.request_id or '-'}]"


class Unclaimable(Exception):
    """Claiming this one job fails. The cause says why."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id


def claim(
    session: Session,
    worker: str,
    node: str,
    slot: Slot,
    lease_seconds: float,
    *,
    beside: Sequence[Slot] = (),
    room: int | None = None,
    half_life: float = HALF_LIFE_SECONDS,
    leave_seconds: float = gang_scheduling.LEAVE_SECONDS,
) -> Claim | None:
    """Take the waiting job whose turn it is among those that `slot` can serve (core/jobs/scheduling/queue_order.py), or
    None. Call in a write transaction of its own.

    `beside` are the free slots of the node, in its order: a job of several takes those that it needs with `slot`, all
    of them or none; where there are too few, they may be kept for it (core/jobs/scheduling/gang_scheduling.py), and
    that is written down. `room` is how many bytes a job may take of the data root (None: not measured),
    `leave_seconds` how long after its time limit a trainer may still be there. A drained node gets nothing, nor does a
    slot that is held. They are the job's from here on. Raises IntegrityError if a job holds `slot` already, and
    Unclaimable where it is the job that cannot be taken: defects.
    """
    now = lock_scheduler(session)
    # Held until the commit: a drain that was answered is not followed by a claim that had begun before it.
    drained_at = select(Node.drained_at).where(Node.name == node).with_for_update(read=True)
    if session.execute(drained_at).scalar_one_or_none() is not None:
        return None
    opening = holds.opening(session, node, slot.id, now)
    if opening.closed is not None:
        return None
    ends_before = opening.ends_before if slot.phase == Kind.TRAIN else None  # a time limit is one of training
    conditions = queue_order.ready(now, room, ends_before)
    look = partial(gang_scheduling.cluster_state, session, now, lease_seconds)
    while True:
        order = queue_order.look(
            session, slot.phase, now, conditions, half_life=half_life, deep=gang_scheduling.MOST_KEPT
        )
        choice = gang_scheduling.choose(order, node, slot, beside, look, leave_seconds)
        _write_down(session, choice.kept, now)
        if choice.waiting is None:
            return None
        # PostgreSQL waits here for a cancel of that moment, and then sees that the job waits no more: look again.
        query = select(Job).where(Job.id == choice.waiting.id, Job.status == Status.QUEUED.value).with_for_update()
        job = session.execute(query).scalar_one_or_none()
        if job is not None:
            break
    job_id = job.id
    try:
        return take(session, job, worker, node, choice.slots, lease_seconds)
    except (OperationalError, InterfaceError, IntegrityError, Unclaimable):
        raise  # the database is away, or has an allocation of the slot
    except Exception as error:
        raise Unclaimable(job_id) from error


@dataclass(frozen=True, slots=True)
class Start:
    """The change of state that goes with a claim."""

    after: Status
    reason: str
    data: dict[str, Any]
    """Data of the event."""
    first: bool
    """Whether the job starts for the first time; preparing its model is no start."""


def kind_of(job: Job, slots: Sequence[Slot]) -> Kind:
    """What an attempt on these slots does: a job whose model is not there yet is prepared, whatever the slot."""
    if job.prepared is None:
        return Kind.PREPARE
    return Kind(job.kind) if job.kind in WAITING_KINDS else slots[0].phase


def decide(
    job: Job, worker: str, node: str, slots: tuple[Slot, ...], opened: Mapping[str, Any], spent: float
) -> tuple[Claim, Start]:
    """What a claim of `job` comes to. Pure: it reads the row that was read, and asks no database.

    `opened`: columns that change because `method: auto` is decided now. `spent`: seconds of earlier training attempts.
    """
    kind = kind_of(job, slots)
    names = [slot.id for slot in slots]
    claimed = Claim(
        Token(job.id, job.attempt + 1, worker),
        kind,
        slots,
        job.owner_id,
        job.project_id,
        job.spec,
        job.prepared,
        job.resume_from,
        opened.get("adjusted", job.adjusted) or {},
        opened.get("settled", job.settled),
        spent,
        job.chain,
        job.lineage,
        job.reward_models,
        job.request_id,
    )
    data = {"node": node, "slot": names[0]} | ({"slots": names} if len(names) > 1 else {})
    data |= {name: opened[name] for name in ("settled", "adjusted") if opened.get(name)}
    if kind == Kind.PREPARE:
        return claimed, Start(Status.PREPARING, f"{node} prepares the model", data, first=False)
    reason = f"starts on {node}, slot{'s' if len(slots) > 1 else ''} {', '.join(names)}"
    return claimed, Start(Status.STARTING, reason, data, first=job.started_at is None)


def take(
    session: Session,
    job: Job,
    worker: str,
    node: str,
    slots: tuple[Slot, ...],
    lease_seconds: float,
    *,
    host: Token | None = None,
) -> Claim | None:
    """Write what `decide` says; None: another worker was quicker. `host`: the session that holds the slots, and whose
    process `job` joins."""
    least = min(slots, key=lambda one: one.device_bytes)
    opens = kind_of(job, slots) in (Kind.TRAIN, Kind.TRIAL) and auto_method.is_open(job.spec, job.settled)
    opened = _settle(session, job, least) if opens else {}
    won, start = decide(job, worker, node, slots, opened, runtime_estimates.spent(session, job.id))
    if host is not None:
        start = replace(start, reason=f"joins {host.job_id} on {node}: one process computes for both, in turns")
    values: dict[str, Any] = {
        "attempt": Job.attempt + 1,
        "worker": worker,
        "node": node,
        "lease_until": db_now() + lease_seconds,
        "not_before": None,
        "reserved_at": None,
        "reserved_node": None,
        "preempted": null(),
        **opened,
    }
    if start.first:
        values["started_at"] = db_now()
    if not move(session, job, start.after, reason=start.reason, data=start.data, values=values):
        return None
    ids = {
        "job_id": won.token.job_id,
        "attempt": won.token.attempt,
        "owner_id": won.owner_id,
        "project_id": won.project_id,
    }
    slot = won.slot
    try:
        session.execute(insert(Attempt).values(**ids, kind=won.kind, node=node, worker=worker, slot=slot.id))
    except IntegrityError as error:  # the job's own number, and not the slot
        raise Unclaimable(job.id) from error
    # Preparing and previewing cost nothing, which is settled at once.
    charged = {} if CHILDREN[slot.phase].billed else {"charged_at": db_now()}
    gpus = 1 if slot.kind == "gpu" else 0
    if host is not None:
        session.execute(insert(SlotGuest).values(**ids, host_id=host.job_id, host_attempt=host.attempt))
    for one in slots if host is None else ():
        row = {**ids, "node": node, "slot": one.id, "gpus": gpus, "billing": slot.billing, **charged}
        session.execute(insert(Allocation).values(**row))
    return won


def _settle(session: Session, job: Job, slot: Slot) -> dict[str, Any]:
    """The columns of a job whose method is settled now, by what `slot` has."""
    spec = oom_backoff.apply(JobSpec.model_validate(job.spec), job.adjusted or {})
    shape, rows = shapes.known(session, spec.model), lengths.rows(session, job.project_id, spec)
    shape = None if shape is None else shapes.with_scorers(session, spec, shape)
    longest = rows.longest
    found = auto_method.settle(spec, shape, longest, slot, rows.training)
    key = Key.parse(job.queue_key)
    if key.needs.plan is not None and found.fits and found.plan is not None and shape is not None:
        key = fit.planned(key, found.spec, shape, longest, [slot])  # what it has come to, it stays
    smaller = {"adjusted": {**(job.adjusted or {}), **found.adjusted}} if found.adjusted else {}
    return {"settled": found.as_dict(), "queue_key": str(key), **smaller}


def _write_down(session: Session, kept: Sequence[gang_scheduling.Reservation], now: float) -> None:
    """Store the reservations: a job at the head of the queue keeps its place while its slots are gathered
    (QueueOrder.rank)."""
    for one in kept:
        if one.waiting.reserved_node != one.group.node:
            since = func.coalesce(Job.reserved_at, now)
            session.execute(
                update(Job)
                .where(Job.id == one.waiting.id, Job.status == Status.QUEUED.value)
                .values(reserved_at=since, reserved_node=one.group.node)
                .execution_options(synchronize_session=False)
            )


def runnable(session: Session, *, room: int | None = None) -> str | None:
    """The oldest job that waits for nothing but a worker's look, or None; `room` as for `claim`."""
    now = read_now(session)
    query = select(Job.id).where(Job.status == Status.QUEUED.value, Job.unmet == 0, *queue_order.ready(now, room, None))
    return session.execute(query.order_by(Job.created_at, Job.id).limit(1)).scalar_one_or_none()


def renew(session: Session, token: Token, lease_seconds: float) -> str | None:
    """Extend the lease. Returns the stop that was asked for ("" for none), or None: the job is lost, kill the child."""
    row = session.execute(
        update(Job)
        .where(*token.holds())
        .values(lease_until=db_now() + lease_seconds)
        .returning(Job.stop_requested)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    return None if row is None else (row.stop_requested or "")


def stop_requested(session: Session, token: Token) -> str | None:
    """As `renew` answers, without writing."""
    row = session.execute(select(Job.stop_requested).where(*token.holds())).one_or_none()
    return None if row is None else (row.stop_requested or "")


def started(session: Session, token: Token, pid: int, pid_started: float) -> bool:
    """Record the child's process, so that a later worker of this node can see to its end. False: the job is lost."""
    if stop_requested(session, token) is None:
        return False
    session.execute(
        update(Attempt)
        .where(Attempt.job_id == token.job_id, Attempt.attempt == token.attempt)
        .values(pid=pid, pid_started=pid_started)
    )
    return True


def running(session: Session, token: Token) -> None:
    """starting → running, on the trainer's first sign of life; later calls and lost jobs change nothing."""
    job = session.execute(select(Job).where(*token.holds()).with_for_update()).scalar_one_or_none()
    if job is not None and job.status == Status.STARTING.value:
        move(session, job, Status.RUNNING, reason=f"runs on {job.node}", guards=token.holds())
