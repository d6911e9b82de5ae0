"""People on the box: slots that are held or drained, and times in which nothing runs on a node.

A hold on a busy slot counts from the end of its job on; with `now` the job is asked to leave: it writes a checkpoint,
waits in the queue again and goes on elsewhere, as after the drain of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Allocation, Hold, Job, Maintenance, Node, User
from core.errors import Conflict, EftError, Fault, Forbidden, NotFound
from core.ids import new_id
from core.jobs.base.scheduler_lock import lock_scheduler
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit, maintenance
from core.jobs.policies.times import BadTime, clock, iso, ring


@dataclass(frozen=True, slots=True)
class NamedSlot:
    """A slot of a node, by a name that people use."""

    node: str
    slot: str
    label: str
    """`box-1/3` for the GPU with index 3, `box-1/cpu`."""


class TooManyHolds(EftError):
    """Somebody who is not an admin of the box holds as many slots as they may."""

    code = "too_many_holds"
    status = 409


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Limits on the holds of one user who is not an admin of the box."""

    seconds: float
    """Longest time of one hold, which has an end."""
    slots: int
    """Slots held at once; 0: only admins of the box hold any."""


@dataclass(frozen=True, slots=True)
class NamedHold:
    """A hold as it is shown."""

    hold: Hold
    user: str
    """Name of who asked."""


# -- which slot


def places(session: Session) -> list[NamedSlot]:
    """The slots that train, of all nodes."""
    found = []
    for name, slots in session.execute(select(Node.name, Node.slots).order_by(Node.name)):
        for entry in slots:
            if entry["kind"] in ("gpu", "cpu"):
                gpu = entry.get("gpu")
                found.append(NamedSlot(name, entry["id"], f"{name}/{entry['id'] if gpu is None else gpu['index']}"))
    return found


def labels(session: Session) -> dict[tuple[str, str], str]:
    """(node, slot) → its name, in the order of the nodes and their slots."""
    return {(one.node, one.slot): one.label for one in places(session)}


def place(session: Session, name: str, field: str = "gpus") -> NamedSlot:
    """By `NODE/INDEX`, `NODE/UUID`, `NODE/cpu-0`, or the part behind the slash where only one node has it.

    Raises NotFound, and Conflict for a name that several have.
    """
    known = places(session)
    found = [one for one in known if name in (one.label, f"{one.node}/{one.slot}")]
    if not found:
        found = [one for one in known if name in (one.label.rpartition("/")[2], one.slot)]
    if len(found) > 1:
        words = ", ".join(one.label for one in found)
        raise Conflict(f"`{name[:80]}` may be any of {words}: name the node too", field=field, code="ambiguous_gpu")
    if not found:
        there = ", ".join(one.label for one in known) or "none"
        raise NotFound(f"there is no GPU `{name[:80]}`; there are: {there}", field=field)
    return found[0]


# -- hold and drain


def hold(
    session: Session,
    actor: Actor,
    names: Sequence[str],
    *,
    held_for: str,
    why: str,
    until: float | None = None,
    kind: Literal["hold", "drain"] = "hold",
    now: bool = False,
    others_jobs: bool = False,
    bounds: HoldLimits | None = None,
) -> list[NamedHold]:
    """Nothing is claimed on these slots until then, or until `release`. All of them or none.

    `now`: their jobs leave at once; those of another project only with `others_jobs`. `bounds`: None for an admin of
    the box, whose holds may be without end; with bounds a hold has an end, by default the latest that it may have.
    Raises NotFound, Conflict for a slot that is held already, BadTime, Forbidden, TooManyHolds.
    """
    moment = lock_scheduler(session)
    if bounds is not None:
        until = _bounded(until, moment, bounds)
    if until is not None and until <= moment:
        message = "`until` is in the past; give a later time, with its date and its offset from UTC"
        raise BadTime(message, field="until", faults=(Fault("bad_time", message, "until"),))
    found = list({(one.node, one.slot): one for one in (place(session, name) for name in names)}.values())
    _let_go_of_expired(session, moment)
    made: list[NamedHold] = []
    for one in found:
        row = {
            "id": new_id("hold"),
            "node": one.node,
            "slot": one.slot,
            "kind": kind,
            "held_for": held_for,
            "why": why,
            "user_id": actor.user_id,
            "until": until,
        }
        try:
            with session.begin_nested():
                session.execute(insert(Hold).values(**row))
        except IntegrityError:
            raise _held_already(session, one) from None
        made.append(_shown(session, session.get_one(Hold, row["id"])))
        data = {"for": held_for, "why": why, "until": None if until is None else iso(until), "now": now}
        audit.record(session, actor, f"gpu.{kind}", one.label, data, project_id=None)
        if now:
            _ask_to_leave(session, actor, one, others_jobs)
    if bounds is not None:
        _require_few(session, actor, moment, bounds)
    return made


def _bounded(until: float | None, moment: float, bounds: HoldLimits) -> float:
    """The end of a hold. Raises BadTime for one that is too late, Forbidden where only admins of the box hold slots."""
    if bounds.slots < 1:
        raise Forbidden("only admins of the box hold GPUs here (EFT_HOLD_SLOTS is 0): ask one of them", field="gpus")
    latest = moment + bounds.seconds
    if until is None:
        return latest
    if until > latest:
        message = (
            f"a hold lasts at most {bounds.seconds / 3600:g} hours here (EFT_HOLD_HOURS), until {clock(latest, moment)}"
            "; give an earlier time, or ask an admin of the box"
        )
        raise BadTime(message, field="until", faults=(Fault("bad_time", message, "until"),))
    return until


def _require_few(session: Session, actor: Actor, moment: float, bounds: HoldLimits) -> None:
    held = select(func.count()).select_from(Hold).where(Hold.user_id == actor.user_id, Hold.kind == "hold")
    count = session.execute(held.where(*_counts(moment))).scalar_one()
    if count > bounds.slots:
        slots = "1 GPU" if bounds.slots == 1 else f"{bounds.slots} GPUs"
        raise TooManyHolds(
            f"you may hold {slots} at once (EFT_HOLD_SLOTS), and these would be {count}: `eft gpu release` one first, "
            "or ask an admin of the box",
            field="gpus",
        )


def _held_already(session: Session, one: NamedSlot) -> Conflict:
    held = session.execute(_active(one)).scalar_one()
    by = session.execute(select(User.name).where(User.id == held.user_id)).scalar_one()
    words = f"GPU {one.label} is {_KINDS[held.kind]} already for {held.held_for or by}"
    return Conflict(f"{words}; `eft gpu release {one.label}` first", field="gpus", code="already_held")


_KINDS: Mapping[str, str] = {"hold": "held", "drain": "drained"}


def _shown(session: Session, row: Hold) -> NamedHold:
    return NamedHold(row, session.execute(select(User.name).where(User.id == row.user_id)).scalar_one())


def _active(one: NamedSlot) -> Any:
    return select(Hold).where(Hold.node == one.node, Hold.slot == one.slot, Hold.released_at.is_(None))


def _ask_to_leave(session: Session, actor: Actor, one: NamedSlot, others_jobs: bool) -> None:
    query = select(Job).join(Allocation, Allocation.job_id == Job.id)
    query = query.where(Allocation.node == one.node, Allocation.slot == one.slot, Allocation.released_at.is_(None))
    for job in session.execute(query.with_for_update(of=Job)).scalars():
        if job.project_id != actor.project_id and not others_jobs:
            raise Forbidden(
                f"a job of another project runs on GPU {one.label}; only an admin of the box may ask it to leave. "
                "Without `now`, the hold begins at the end of that job",
                field="now",
            )
        if Status(job.status) in (Status.STARTING, Status.RUNNING) and job.stop_requested is None:
            session.execute(update(Job).where(Job.id == job.id).values(stop_requested=StopReason.HOLD))


def _let_go_of_expired(session: Session, moment: float) -> None:
    over = update(Hold).where(Hold.released_at.is_(None), Hold.until <= moment)
    session.execute(over.values(released_at=Hold.until).execution_options(synchronize_session=False))


def release(session: Session, actor: Actor, names: Sequence[str], *, anybodys: bool = False) -> list[NamedHold]:
    """End the holds on these slots. Their maker may, and with `anybodys` an admin of the box.

    Raises NotFound, and Conflict for a slot that is not held or is somebody else's.
    """
    moment = lock_scheduler(session)
    _let_go_of_expired(session, moment)
    done = []
    for one in [place(session, name) for name in names]:
        held: Hold | None = session.execute(_active(one).with_for_update()).scalar_one_or_none()
        if held is None:
            raise Conflict(f"GPU {one.label} is not held", field="gpus", code="not_held")
        if held.user_id != actor.user_id and not anybodys:
            by = session.execute(select(User.name).where(User.id == held.user_id)).scalar_one()
            words = f"GPU {one.label} is held by {by}, who may release it; so may an admin of the box"
            raise Conflict(words, field="gpus", code="held_by_another")
        session.execute(update(Hold).where(Hold.id == held.id).values(released_at=db_now()))
        session.refresh(held)
        audit.record(session, actor, "gpu.release", one.label, {"hold": held.id}, project_id=None)
        done.append(_shown(session, held))
    ring(session)
    return done


def active(session: Session, moment: float) -> list[NamedHold]:
    """Holds that count now, by node and slot."""
    query = select(Hold, User.name).join(User, User.id == Hold.user_id).where(*_counts(moment))
    return [NamedHold(row, user) for row, user in session.execute(query.order_by(Hold.node, Hold.slot))]


def _counts(moment: float) -> list[ColumnElement[bool]]:
    return [Hold.released_at.is_(None), or_(Hold.until.is_(None), Hold.until > moment)]


# -- for a claim


@dataclass(frozen=True, slots=True)
class Opening:
    """Whether a slot may be claimed now: `closed` says why not. Until `ends_before` what is started must be over, as
    far as its time limit says."""

    closed: str | None
    ends_before: float | None


def opening(session: Session, node: str, slot: str, moment: float) -> Opening:
    held = session.execute(select(Hold).where(Hold.node == node, Hold.slot == slot, *_counts(moment)).limit(1))
    windows = [window for window in maintenance.planned(session, moment) if window.node in (None, node)]
    return opening_of(held.scalar_one_or_none(), windows, moment)


def opening_of(held: Hold | None, windows: Sequence[Maintenance], moment: float) -> Opening:
    """The same from what is known already: a claim and an explanation ask this one function."""
    ends_before = next((window.starts_at for window in windows if window.starts_at > moment), None)
    if held is not None:
        return Opening(held_words(held, moment), ends_before)
    if windows and windows[0].starts_at <= moment:
        return Opening(f"maintenance until {clock(windows[0].ends_at, moment)}: {windows[0].why}", ends_before)
    return Opening(None, ends_before)


def held_words(held: Hold, moment: float) -> str:
    """E.g. `held until 18:00 UTC for bob (notebook)`."""
    until = f" until {clock(held.until, moment)}" if held.until is not None else ""
    whose = f" for {held.held_for}" if held.held_for else ""
    return f"{_KINDS[held.kind]}{until}{whose}{f' ({held.why})' if held.why else ''}"
