"""What the sessions of a user or a project may take at once. Unlike the quotas that hold jobs, these refuse: a program
waits for the answer of its operation, and would wait for as long as the quota holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from core.db.engine import read_now
from core.db.tables import Allocation, Job, Limit, SessionOperation, SessionRow, SlotGuest
from core.errors import Forbidden
from core.jobs.base.states import FINAL
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.sessions.records import KIND, FoundSession
from core.jobs.policies import quotas, usage
from core.jobs.policies.quotas import Scope
from core.jobs.policies.usage import DAY

Field = Literal["max_sessions", "max_adapters", "session_hours_week", "session_bytes"]

_WORDS: dict[Field, tuple[str, str]] = {
    "max_sessions": (
        "quota of {limit:g} open sessions is used",
        "close one first (`eft sessions list --mine`, `eft sessions close`)",
    ),
    "max_adapters": (
        "quota of {limit:g} adapters in open sessions is used",
        "drop an adapter or close a session first",
    ),
    "session_hours_week": (
        "quota of {limit:g} hours a week for sessions is used ({used:.1f} in seven days)",
        "`save` still works; the rest can go on when older days no longer count",
    ),
    "session_bytes": (
        "quota of {limit} for operations and results of sessions is used ({used})",
        "close a session, or wait until old results are removed (EFT_SESSION_RESULT_HOURS)",
    ),
}
"""What is used, and the way out."""


class SessionQuota(Forbidden):
    """A quota of sessions is used up. Clients do not try again by themselves, as they would after a 429."""

    code = "session_quota"


def check_sessions(session: Session, actor: Actor, default: int) -> None:
    """Check the number of open sessions, the newest of which was just made. `default`: of a user without a quota; 0: no
    limit. Raises SessionQuota."""
    held = _held(session, actor.user_id, actor.project_id)
    by_default = bool(default) and "max_sessions" not in held.get("owner", {})
    if by_default:
        held.setdefault("owner", {})["max_sessions"] = default
    for scope, limits in held.items():
        if (most := limits.get("max_sessions")) is not None:
            count = _count(session, _open(scope, actor.user_id, actor.project_id))
            if count > most:
                told = by_default and scope == "owner"
                raise _used_up(session, scope, actor.user_id, actor.project_id, "max_sessions", most, count, told)
        if (hours := limits.get("session_hours_week")) is not None:
            _check_hours(session, scope, actor.user_id, actor.project_id, hours)


def check_operation(session: Session, found: FoundSession, operation: Mapping[str, Any], size: int) -> None:
    """Check an operation with `size` bytes of tensors before it is accepted. Raises SessionQuota."""
    owner_id, project_id = found.row.owner_id, found.row.project_id
    for scope, limits in _held(session, owner_id, project_id).items():
        whose = _open(scope, owner_id, project_id)
        if (most := limits.get("max_adapters")) is not None and operation["op"] in ("create", "load"):
            adapters = _adapters(session, whose)
            new = (found.row.id, operation["model"]) not in adapters
            if new and len(adapters) >= most:
                raise _used_up(session, scope, owner_id, project_id, "max_adapters", most, len(adapters))
        if (hours := limits.get("session_hours_week")) is not None and operation["op"] != "save":
            _check_hours(session, scope, owner_id, project_id, hours)
        if (room := limits.get("session_bytes")) is not None and size:
            used = _bytes(session, scope, owner_id, project_id)
            if used + size > room:
                raise _used_up(session, scope, owner_id, project_id, "session_bytes", room, used)


def _held(session: Session, owner_id: str, project_id: str) -> dict[Scope, dict[Field, float]]:
    """Quotas of sessions that count here, by whose they are; their rows are locked, so that of two operations at once
    the second sees what the first has taken."""
    columns = [getattr(Limit, name) for name in _WORDS]
    somewhere = func.coalesce(*columns).is_not(None)
    query = quotas.of(owner_id, project_id, Limit.scope, *columns).where(somewhere)
    found: dict[Scope, dict[Field, float]] = {}
    for scope, *values in session.execute(query.with_for_update()):
        found[scope] = {name: value for name, value in zip(_WORDS, values, strict=True) if value is not None}
    return found


def _whose(table: Any, scope: Scope, owner_id: str, project_id: str) -> ColumnElement[bool]:
    one: ColumnElement[bool] = table.project_id == project_id if scope == "project" else table.owner_id == owner_id
    return one


def _open(scope: Scope, owner_id: str, project_id: str) -> list[ColumnElement[bool]]:
    ended = Job.status.in_([status.value for status in FINAL])
    return [Job.kind == KIND, _whose(Job, scope, owner_id, project_id), ~ended]


def _count(session: Session, whose: list[ColumnElement[bool]]) -> int:
    return int(session.execute(select(func.count()).select_from(Job).where(*whose)).scalar_one())


def _adapters(session: Session, whose: list[ColumnElement[bool]]) -> set[tuple[str, str]]:
    """Adapters that the logs of open sessions come to, those that wait to be made too: (session, name)."""
    op = SessionOperation.operation["op"].as_string()
    query = (
        select(SessionOperation.session_id, op, SessionOperation.operation["model"].as_string())
        .join(Job, Job.id == SessionOperation.session_id)
        .where(*whose, op.in_(["create", "load", "drop"]), SessionOperation.error.is_(None))
        .order_by(SessionOperation.session_id, SessionOperation.position)
    )
    found: set[tuple[str, str]] = set()
    for session_id, word, name in session.execute(query):
        (found.discard if word == "drop" else found.add)((session_id, name))
    return found


def _check_hours(session: Session, scope: Scope, owner_id: str, project_id: str, most: float) -> None:
    """Hours for which sessions held slots, or their parts of those that they shared, today and in the six days before
    (UTC), as `gpu_hours_week` counts them."""
    now = read_now(session)
    since = (now // DAY - quotas.WEEK_DAYS + 1) * DAY
    hosts = select(SlotGuest.host_id).where(_whose(SlotGuest, scope, owner_id, project_id))
    mine = _whose(Allocation, scope, owner_id, project_id) | Allocation.job_id.in_(hosts)
    which = (Allocation.billing > 0) & (func.coalesce(Allocation.released_at, now) > since) & mine
    query = select(*(getattr(Allocation, name) for name in usage.HELD)).join(Job, Job.id == Allocation.job_id)
    used = 0.0
    for span in usage.divided(session, session.execute(query.where(Job.kind == KIND, which)).all(), which):
        if (span.project_id if scope == "project" else span.owner_id) == (
            project_id if scope == "project" else owner_id
        ):
            seconds = (now if span.ended is None else span.ended) - max(span.began, since)
            used += span.part * max(0.0, seconds) / 3600.0
    if used >= most:
        raise _used_up(session, scope, owner_id, project_id, "session_hours_week", most, used)


def _bytes(session: Session, scope: Scope, owner_id: str, project_id: str) -> int:
    query = select(func.coalesce(func.sum(SessionRow.log_bytes), 0))
    return int(session.execute(query.where(_whose(SessionRow, scope, owner_id, project_id))).scalar_one())


def _used_up(
    session: Session,
    scope: Scope,
    owner_id: str,
    project_id: str,
    field: Field,
    limit: float,
    used: float,
    by_default: bool = False,
) -> SessionQuota:
    subject_id = owner_id if scope == "owner" else project_id
    name = quotas.names(session, [subject_id]).get(subject_id, subject_id)
    words, way_out = _WORDS[field]
    figures: dict[str, Any] = {"limit": limit, "used": used}
    if field == "session_bytes":
        figures = {key: f"{value / 1e9:.2f} GB" for key, value in figures.items()}
    setting = "EFT_MAX_SESSIONS" if by_default else "`eft quota list`"
    return SessionQuota(f"{scope} {name}: {words.format(**figures)} ({setting}): {way_out}")
