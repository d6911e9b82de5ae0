"""Jobs of several slots: which slots of which node, those that are kept for one until there are enough, and who may go
ahead meanwhile.

A job of k slots takes k of one node and one family (Slot.family) in one transaction, or none. Where its turn comes and
fewer are free, the k slots that come together soonest are kept for it: Slurm and Maui call it the reservation of the
head of the line (Mu'alem and Feitelson 2001, doi:10.1109/71.932708, "EASY backfilling"). On a slot that is kept only
those jobs start that are over before k slots of that node can be free: how long they take is known by their time limit,
or by what their own trainer said was left, and when the others leave by what theirs say. Of whom nothing is known, that
one may leave at any moment, and nobody is let in who may stay for any time.

`choose` is all there is to it; a claim takes what it says, an explanation asks it for every free slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sqlalchemy.orm import Session

from core.jobs.base.slots import Key, Needs, Slot
from core.jobs.kinds import Kind
from core.jobs.scheduling import cluster, runtime_estimates
from core.jobs.scheduling.cluster import SlotState
from core.jobs.scheduling.queue_order import QueueOrder, Waiting, serves

LEAVE_SECONDS = 150.0
"""EFT_STOP_GRACE_SECONDS and EFT_GPU_CLEAR_SECONDS as they are by default."""
MOST_KEPT = 8
"""Jobs for which slots are kept at once, at the most: each of them has two slots at the least."""
WORTH_MOVING = 60.0
"""Seconds that another node must be earlier for the slots kept to be given up for its."""


@dataclass(frozen=True, slots=True)
class Group:
    """Slots of one node that a job of several would take."""

    node: str
    seats: tuple[int, ...]
    """By their places in the hall."""
    start: float | None
    """Time at which all of them are free; None: unknown."""
    earliest: float
    """Before that so many do not come free on this node by themselves, whichever they are."""
    anywhere: float
    """The same of any node."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What is kept for whom."""

    waiting: Waiting
    group: Group


@dataclass(slots=True)
class ClusterState:
    """The slots that train, of all nodes, at one moment, and when each comes free by itself."""

    now: float
    seats: Sequence[SlotState]
    free_at: Mapping[int, float | None]
    """When each open slot is free, Unix seconds, by its index; None: unknown, it may be at any moment."""
    opens_at: Mapping[int, float] = field(default_factory=dict)
    """When each closed slot opens, Unix seconds, where that is known."""
    numbers: dict[tuple[str, str], int] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = {(seat.node, seat.slot.id): number for number, seat in enumerate(self.seats)}

    def node(self, name: str) -> list[Slot]:
        return [seat.slot for seat in self.seats if seat.node == name and seat.slot.phase == Kind.TRAIN]

    def number(self, node: str, slot: Slot) -> int | None:
        return self.numbers.get((node, slot.id))


def cluster_state(session: Session, now: float, silent_after: float) -> ClusterState:
    """As a claim sees it: a running job leaves no sooner than its own steps say."""
    return cluster_state_of(session, now, cluster.slot_states(session, now, silent_after))


def cluster_state_of(session: Session, now: float, everything: Sequence[SlotState]) -> ClusterState:
    """The same of seats that were read already."""
    seats = [seat for seat in everything if seat.slot.phase == Kind.TRAIN]
    running = cluster.running(session, seats)
    to_go = runtime_estimates.of_running(session, list(running.values()), now)
    free_at: dict[int, float | None] = {}
    opens_at: dict[int, float] = {}
    for number, seat in enumerate(seats):
        if seat.closed is not None:
            if seat.opens_at is not None:
                opens_at[number] = seat.opens_at
            continue
        job = None if seat.busy is None else running.get(seat.busy)
        if job is None or runtime_estimates.leaves(job):
            free_at[number] = now
        else:
            seconds = to_go[job.id].surely
            free_at[number] = None if seconds is None else now + seconds
    return ClusterState(now, seats, free_at, opens_at)


def gather(
    seats: Sequence[SlotState],
    free_at: Mapping[int, float | None],
    needs: Needs,
    taken: Collection[int] = (),
    *,
    takes: float | None = None,
    stay: str | None = None,
    others: Mapping[int, float] = MappingProxyType({}),
) -> Group | None:
    """The slots for a job of several that come together soonest, none of them `taken`; None: no node has so many open.

    `takes`: seconds that it will hold them at the most, as far as known: it is not over before a maintenance begins.
    `stay`: the node where slots are kept for it already. `others`: seats that it could have as well, and not before
    these times, such as those that are taken; they count for `Group.earliest` alone.
    """
    there: dict[tuple[str, tuple[str, str, str]], list[int]] = {}
    for number in sorted(free_at):
        seat = seats[number]
        if number not in taken and not needs.missing(seat.slot):
            there.setdefault((seat.node, seat.slot.family), []).append(number)
    best: tuple[tuple[int, float, str, tuple[str, str, str]], Group] | None = None
    for (node, family), numbers in there.items():
        if len(numbers) < needs.gpus:
            continue
        chosen = sorted(numbers, key=lambda number: (free_at[number] is None, free_at[number] or 0.0, number))
        chosen = chosen[: needs.gpus]
        times = [at for number in chosen if (at := free_at[number]) is not None]
        unknown, known = len(chosen) - len(times), max(times, default=0.0)
        closes = seats[chosen[0]].ends_before
        if closes is not None and known + (takes or 0.0) > closes:
            continue
        rank = (unknown, known + (0.0 if node == stay else WORTH_MOVING), node, family)
        if best is None or rank < best[0]:
            best = rank, Group(node, tuple(sorted(chosen)), None if unknown else known, 0.0, 0.0)
    if best is None:
        return None
    group = best[1]
    soonest: dict[tuple[str, tuple[str, str, str]], list[float]] = {}
    for number in {*free_at, *others}:
        seat = seats[number]
        if not needs.missing(seat.slot):
            at = max(free_at.get(number) or 0.0, others.get(number, 0.0))
            soonest.setdefault((seat.node, seat.slot.family), []).append(at)
    lower = {where: sorted(times)[needs.gpus - 1] for where, times in soonest.items() if len(times) >= needs.gpus}
    here = lower[group.node, seats[group.seats[0]].slot.family]
    return replace(group, earliest=here, anywhere=min(lower.values()))


def closes_too_soon(seats: Sequence[SlotState], waiting: Waiting) -> bool:
    """A maintenance is planned that may be what keeps it out, and not one that needs the same and is shorter."""
    return waiting.bound is not None and any(seat.ends_before is not None for seat in seats)


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The job that takes a free slot, the other slots it takes with it, and the reservations of other jobs."""

    waiting: Waiting | None
    slots: tuple[Slot, ...]
    """In the order of their node."""
    kept: tuple[Reservation, ...]


def choose(
    order: QueueOrder,
    node: str,
    slot: Slot,
    beside: Sequence[Slot],
    look: Callable[[], ClusterState],
    leave_seconds: float,
) -> SlotChoice:
    """Choose the job that starts on `slot` of `node`. `beside` are the free slots of the node that it may take too,
    in its order. The call consumes `order`, and calls `look` only where jobs of several slots wait.

    `leave_seconds`: how long after its time limit a job may still hold its slots.
    """
    walk = _QueueWalk(order, node, slot, beside, look)
    while (waiting := order.next(walk.fits)) is not None:
        slots = walk.members(waiting.key)
        if slots is not None:
            return SlotChoice(waiting, slots, tuple(walk.kept))
        group = walk.keep(waiting)
        if group is not None and walk.is_in(group):
            break
    else:
        return SlotChoice(None, (), tuple(walk.kept))
    # The slot is kept, and any other job on it must be gone by then.
    within = group.earliest - order.now - leave_seconds
    if within <= 0:
        return SlotChoice(None, (), tuple(walk.kept))
    gap = _QueueWalk(order.bounded(within), node, slot, beside, look, list(walk.kept), set(walk.passed), group.earliest)
    while (waiting := gap.order.next(gap.fits)) is not None:
        slots = gap.members(waiting.key)
        if slots is not None:
            return SlotChoice(waiting, slots, tuple(gap.kept))
        gap.passed.add(waiting.key.needs)
    return SlotChoice(None, (), tuple(gap.kept))


@dataclass(slots=True)
class _QueueWalk:
    """Down the line, for one free slot."""

    order: QueueOrder
    node: str
    slot: Slot
    beside: Sequence[Slot]
    look: Callable[[], ClusterState]
    kept: list[Reservation] = field(default_factory=list)
    passed: set[Needs | Key] = field(default_factory=set)
    """Needs of which no job can start here now, nor has slots kept; and lines whose next one cannot, for its length."""
    until: float | None = None
    """When what starts now must be gone; None: it may stay."""
    _state: ClusterState | None = None

    @property
    def state(self) -> ClusterState:
        if self._state is None:
            self._state = self.look()
        return self._state

    def fits(self, key: Key) -> bool:
        if key.needs in self.passed or key in self.passed:
            return False
        if self.until is not None and any(self._in_its_way(key, kept.waiting.key) for kept in self.kept):
            return False
        if key.needs.width(self.slot.phase) == 1:
            return not key.needs.missing(self.slot)
        return serves(self.slot, self.state.node(self.node))(key)

    def _in_its_way(self, key: Key, kept: Key) -> bool:
        """What it uses may keep the other from starting, for want of a quota."""
        budgets = (key.owner_id, key.project_id), (kept.owner_id, kept.project_id)
        return self.order.standing.one_budget(*budgets)

    def members(self, key: Key) -> tuple[Slot, ...] | None:
        """The slots on which such a job starts now; None: there are too few."""
        width = key.needs.width(self.slot.phase)
        if width == 1:
            return (self.slot,)
        mine = self.state.number(self.node, self.slot)
        if mine is None:
            return None  # a node that no worker has described
        usable = [one for one in self.beside if one.id != self.slot.id and self._usable(one, key.needs)]
        if len(usable) + 1 < width:
            return None
        chosen = {self.slot.id, *(one.id for one in usable[: width - 1])}
        ordered = self.beside if any(one.id == self.slot.id for one in self.beside) else (self.slot, *self.beside)
        return tuple(one for one in ordered if one.id in chosen)

    def _usable(self, slot: Slot, needs: Needs) -> bool:
        number = self.state.number(self.node, slot)
        if slot.family != self.slot.family or needs.missing(slot) or number is None:
            return False
        if not self.state.seats[number].free:
            return False
        groups = [one.group for one in self.kept if number in one.group.seats]
        return all(self.until is not None and one.earliest >= self.until for one in groups)

    def keep(self, waiting: Waiting) -> Group | None:
        """Slots are kept for it from here on, if any node will have enough."""
        state, needs = self.state, waiting.key.needs
        taken = {number: kept.group.anywhere for kept in self.kept for number in kept.group.seats}
        others = {**state.opens_at, **taken}
        group = None
        if len(self.kept) < MOST_KEPT:
            stay = waiting.reserved_node
            group = gather(state.seats, state.free_at, needs, taken, takes=waiting.bound, stay=stay, others=others)
        if group is None:
            self.passed.add(waiting.key if closes_too_soon(self.state.seats, waiting) else waiting.key.needs)
            return None
        self.kept.append(Reservation(waiting, group))
        self.order.take(waiting, self.slot.billing)
        return group

    def is_in(self, group: Group) -> bool:
        return self.state.number(self.node, self.slot) in group.seats
