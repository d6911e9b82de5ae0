"""The slots of all nodes as a waiting job sees them: which could take it, which of them cannot now, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import Allocation, Hold, Job, Maintenance, Node, User
from core.jobs.base.slots import Slot
from core.jobs.policies import holds, maintenance


@dataclass(slots=True)
class SlotState:
    """A slot of a node, now."""

    node: str
    slot: Slot
    label: str
    """As people name it: `box-1/0`, `box-1/cpu`."""
    gpu: Mapping[str, Any]
    """As the worker described it; empty for others."""
    busy: str | None
    """The job that has it."""
    busy_project: str | None
    closed: str | None
    """Why nothing is claimed on it, in words: held, drained, silent, in quarantine, used by somebody else."""
    state: str
    """free, busy, held, drained, maintenance, quarantined, outside or silent."""
    processes: Sequence[Mapping[str, Any]]
    """Processes of people who use it beside eft: pid, user, name, bytes."""
    live: Mapping[str, Any]
    """What the worker read last, by the names of `Live` (core.hardware); empty if unknown, or if it is silent."""
    held: Hold | None
    ends_before: float | None
    """What is started must be over by then, as far as its time limit says."""
    opens_at: float | None
    """Time at which the slot opens again; None: unknown."""
    gone: bool = False
    """Nothing was heard of its worker for long, whatever else `state` says of it."""

    @property
    def free(self) -> bool:
        return self.busy is None and self.closed is None


def slot_states(session: Session, now: float, silent_after: float) -> list[SlotState]:
    """All slots, by node, in the order in which their workers name them."""
    held: dict[tuple[str, str], Hold] = {(one.hold.node, one.hold.slot): one.hold for one in holds.active(session, now)}
    planned = maintenance.planned(session, now)
    busy: dict[tuple[str, str], tuple[str, str]] = {}
    for taken in session.execute(
        select(Allocation.node, Allocation.slot, Allocation.job_id, Allocation.project_id).where(
            Allocation.released_at.is_(None)
        )
    ):
        busy[taken.node, taken.slot] = (taken.job_id, taken.project_id)
    found = []
    for row in session.execute(select(Node).order_by(Node.name)).scalars():
        windows = [window for window in planned if window.node in (None, row.name)]
        for entry in row.slots:
            slot = Slot.described(entry, row.labels)
            seat = _seat(row, entry, slot, held.get((row.name, slot.id)), windows, now, silent_after)
            if (row.name, slot.id) in busy:
                seat.busy, seat.busy_project = busy[row.name, slot.id]
            if seat.busy is not None and seat.state in ("free", "outside"):
                seat.closed, seat.state = None, "busy"  # the processes seen there may be its own
            found.append(seat)
    return found


def _seat(
    node: Node,
    entry: Mapping[str, Any],
    slot: Slot,
    hold: Hold | None,
    windows: Sequence[Maintenance],
    now: float,
    silent_after: float,
) -> SlotState:
    gpu = entry.get("gpu") or {}
    label = f"{node.name}/{gpu.get('index', slot.id)}"
    processes = entry.get("processes") or []
    opening = holds.opening_of(hold, windows, now)
    closed, state, opens_at = opening.closed, "free", None
    silent = now - node.heartbeat_at > silent_after
    live = {} if silent else gpu.get("live") or {}
    if node.drained_at is not None:
        closed, state = f"the node is drained{f' ({node.drain_reason})' if node.drain_reason else ''}", "drained"
    elif silent:
        closed, state = "its worker is silent", "silent"
    elif closed is not None and hold is not None:
        state, opens_at = "held" if hold.kind == "hold" else "drained", hold.until
    elif closed is not None:
        state, opens_at = "maintenance", windows[0].ends_at
    elif entry.get("quarantined"):
        closed, state = f"in quarantine: {entry['quarantined']}", "quarantined"
    elif processes:
        closed, state = f"used by {_people(processes)}", "outside"
    ends_before = opening.ends_before
    return SlotState(
        node.name, slot, label, gpu, None, None, closed, state, processes, live, hold, ends_before, opens_at, silent
    )


def _people(processes: Sequence[Mapping[str, Any]]) -> str:
    """E.g. `bob, outside eft (pid 4711, python)`."""
    first = processes[0]
    more = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
    return f"{first.get('user') or 'somebody'}, outside eft (pid {first['pid']}, {first.get('name') or '?'}{more})"


def running(session: Session, slot_states: Sequence[SlotState]) -> dict[str, Job]:
    """The jobs that have them."""
    ids = [seat.busy for seat in slot_states if seat.busy is not None]
    rows = session.execute(select(Job).where(Job.id.in_(ids))).scalars() if ids else ()
    return {job.id: job for job in rows}


def held(session: Session, job_ids: Sequence[str]) -> dict[str, list[str]]:
    """The slots that jobs have now, as people name them, in the order of their node."""
    query = select(Allocation.job_id, Allocation.node, Allocation.slot)
    taken = session.execute(query.where(Allocation.job_id.in_(job_ids), Allocation.released_at.is_(None))).all()
    found: dict[str, list[str]] = {}
    if taken:
        labels = holds.labels(session)
        places = {place: number for number, place in enumerate(labels)}
        for job_id, node, slot in sorted(taken, key=lambda row: places.get((row[1], row[2]), len(places))):
            found.setdefault(job_id, []).append(labels.get((node, slot), f"{node}/{slot}"))
    return found


@dataclass(frozen=True, slots=True)
class SlotUse:
    """A time in which a slot was not free."""

    what: str
    """job, hold or drain."""
    job_id: str | None
    project_id: str | None
    user: str
    why: str | None
    began: float
    ended: float | None


def history(session: Session, node: str, slot: str, limit: int) -> list[SlotUse]:
    """Newest first."""
    taken = session.execute(
        select(Allocation, User.name)
        .join(User, User.id == Allocation.owner_id)
        .where(Allocation.node == node, Allocation.slot == slot)
        .order_by(Allocation.created_at.desc(), Allocation.job_id.desc())
        .limit(limit)
    )
    spans = [
        SlotUse("job", row.job_id, row.project_id, user, None, row.created_at, row.released_at) for row, user in taken
    ]
    held = session.execute(
        select(Hold, User.name)
        .join(User, User.id == Hold.user_id)
        .where(Hold.node == node, Hold.slot == slot)
        .order_by(Hold.created_at.desc(), Hold.id.desc())
        .limit(limit)
    )
    for row, user in held:
        words = " ".join(part for part in (f"for {row.held_for}" if row.held_for else "", row.why) if part)
        spans.append(SlotUse(row.kind, None, None, user, words or None, row.created_at, row.released_at or row.until))
    return sorted(spans, key=lambda span: span.began, reverse=True)[:limit]
