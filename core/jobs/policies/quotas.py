"""Shares, priorities and quotas of projects and owners. A quota holds a job, with its reason, and never refuses one;
those of sessions (core/jobs/lifecycle/sessions/limits.py) and previews (core/jobs/policies/volume.py) refuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import Select, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from core.db.tables import Limit, Project, UsageDay, UsageTotal, User
from core.errors import Fault, NotFound, SpecError
from core.jobs.base.shares import UsageSpan
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit
from core.jobs.policies.usage import DAY, by_day

Scope = Literal["project", "owner"]
MAX_PRIORITY = 10
"""The highest priority that jobs of a project may have, unless an admin of the box has set another."""
WEEK_DAYS = 7
FIELDS = (
    "shares",
    "max_priority",
    "max_running",
    "max_queued",
    "max_previews",
    "max_sessions",
    "max_adapters",
    "session_hours_week",
    "session_bytes",
    "gpu_hours_week",
    "disk_bytes",
    "preemptible",
)


@dataclass(frozen=True, slots=True)
class Quota:
    """A quota that is used up: why a job is held."""

    scope: Scope
    subject_id: str
    kind: Literal["running", "queued", "gpu_hours_week", "disk"]
    limit: float
    used: float

    def words(self, names: Mapping[str, str]) -> str:
        """E.g. `project lab: quota of 2 running jobs is used`."""
        who = f"{self.scope} {names.get(self.subject_id, self.subject_id)}"
        match self.kind:
            case "running":
                jobs = "job" if self.limit == 1 else "jobs"
                return f"{who}: quota of {self.limit:g} running {jobs} is used"
            case "queued":
                jobs = "job" if self.limit == 1 else "jobs"
                return f"{who}: quota of {self.limit:g} queued {jobs} is used; older ones or higher priorities go first"
            case "gpu_hours_week":
                return f"{who}: quota of {self.limit:g} GPU hours a week is used ({self.used:.1f} in seven days)"
            case "disk":
                return f"{who}: quota of {_gb(self.limit)} on disk is used ({_gb(self.used)}); see `eft delete`"


SERVING = "serving-"
"""Prefix of the ids of models that are served, which count in no quota of running jobs."""


@dataclass(slots=True)
class QuotaUsage:
    """Quotas and what is used of them, as of one moment. `take` counts a job that is started."""

    limits: Mapping[tuple[Scope, str], Limit]
    running: dict[tuple[str, str], int] = field(default_factory=dict)
    gpu_hours: Mapping[tuple[str, str], float] = field(default_factory=dict)
    disk: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def shares(self, owner_id: str) -> float:
        row = self.limits.get(("owner", owner_id))
        return 1.0 if row is None or row.shares is None else row.shares

    def used_up(self, owner_id: str, project_id: str) -> Quota | None:
        """The first quota that keeps any job of this owner in this project from starting."""
        for scope, subject_id in _scopes(owner_id, project_id):
            row = self.limits.get((scope, subject_id))
            if row is None:
                continue
            whose = (scope, subject_id)
            if row.max_running is not None and self.running.get(whose, 0) >= row.max_running:
                return Quota(scope, subject_id, "running", row.max_running, self.running.get(whose, 0))
            if row.gpu_hours_week is not None and self.gpu_hours.get(whose, 0.0) >= row.gpu_hours_week:
                return Quota(scope, subject_id, "gpu_hours_week", row.gpu_hours_week, self.gpu_hours.get(whose, 0.0))
            if row.disk_bytes is not None and self.disk.get(whose, 0) >= row.disk_bytes:
                return Quota(scope, subject_id, "disk", row.disk_bytes, self.disk.get(whose, 0))
        return None

    def one_budget(self, first: tuple[str, str], second: tuple[str, str]) -> bool:
        """Whether what one (owner, project) uses may keep the other's jobs from starting: of GPU hours, of disk."""
        for whose in set(_scopes(*first)) & set(_scopes(*second)):
            row = self.limits.get(whose)
            if row is not None and (row.gpu_hours_week is not None or row.disk_bytes is not None):
                return True
        return False

    def queues(self) -> list[tuple[Scope, str, int]]:
        """The quotas of queued jobs."""
        return [
            (row.scope, row.subject_id, row.max_queued) for row in self.limits.values() if row.max_queued is not None
        ]

    def take(self, owner_id: str, project_id: str) -> None:
        for whose in _scopes(owner_id, project_id):
            self.running[whose] = self.running.get(whose, 0) + 1


def _scopes(owner_id: str, project_id: str) -> tuple[tuple[Scope, str], tuple[Scope, str]]:
    return ("project", project_id), ("owner", owner_id)


def standing(session: Session, spans: Iterable[UsageSpan], now: float) -> QuotaUsage:
    """What counts now; a quota's figures are looked up only where somebody has that quota."""
    limits = {(row.scope, row.subject_id): row for row in session.execute(select(Limit)).scalars()}
    found = QuotaUsage(limits)
    spans = list(spans)
    at_work = {
        span.attempt: (span.owner_id, span.project_id)
        for span in spans
        if span.ended is None and not span.attempt[0].startswith(SERVING)  # it leaves as soon as a job can start
    }
    for owner_id, project_id in at_work.values():  # jobs, however many slots each has
        found.take(owner_id, project_id)
    if any(row.gpu_hours_week is not None for row in limits.values()):
        found.gpu_hours = _gpu_hours(session, spans, now)
    if any(row.disk_bytes is not None for row in limits.values()):
        found.disk = _disk(session)
    return found


def _gpu_hours(session: Session, spans: Iterable[UsageSpan], now: float) -> dict[tuple[str, str], float]:
    """GPU hours of today and the six days before it (UTC)."""
    first = int(now // DAY) - WEEK_DAYS + 1
    hours: dict[tuple[str, str], float] = {}

    def count(owner_id: str, project_id: str, seconds: float) -> None:
        for whose in _scopes(owner_id, project_id):
            hours[whose] = hours.get(whose, 0.0) + seconds / 3600

    rows = session.execute(
        select(UsageDay.owner_id, UsageDay.project_id, func.sum(UsageDay.gpu_seconds))
        .where(UsageDay.day >= first)
        .group_by(UsageDay.owner_id, UsageDay.project_id)
    )
    for row in rows:
        count(*row)
    for span in spans:
        ended = now if span.ended is None else span.ended
        for day, seconds in by_day(span.began, ended) if span.gpus else ():
            if day >= first:
                count(span.owner_id, span.project_id, span.part * seconds * span.gpus)
    return hours


def _disk(session: Session) -> dict[tuple[str, str], int]:
    used: dict[tuple[str, str], int] = {}
    for owner_id, project_id, count in session.execute(
        select(UsageTotal.owner_id, UsageTotal.project_id, UsageTotal.disk_bytes)
    ):
        for whose in _scopes(owner_id, project_id):
            used[whose] = used.get(whose, 0) + count
    return used


def limits(session: Session, only: Actor | None) -> Sequence[Limit]:
    """Shares and quotas of everybody, or of the user and project of `only`."""
    query = select(Limit).order_by(Limit.scope.desc(), Limit.subject_id)
    if only is not None:
        project = (Limit.scope == "project") & (Limit.subject_id == only.project_id)
        query = query.where(or_(project, (Limit.scope == "owner") & (Limit.subject_id == only.user_id)))
    return session.execute(query).scalars().all()


def of(owner_id: str, project_id: str, *columns: Any) -> Select[Any]:
    """Columns of the rows that count for an owner in a project."""
    mine = or_(
        *((Limit.scope == scope) & (Limit.subject_id == whose) for scope, whose in _scopes(owner_id, project_id))
    )
    return select(*columns).where(mine).order_by(Limit.scope)


# -- priority


def max_priority(session: Session, project_id: str) -> int:
    query = select(Limit.max_priority).where(Limit.scope == "project", Limit.subject_id == project_id)
    found = session.execute(query).scalar_one_or_none()
    return MAX_PRIORITY if found is None else found


def check_priority(session: Session, project_id: str, priority: int) -> None:
    """Check a priority. Raises SpecError if it is above the project's limit."""
    most = max_priority(session, project_id)
    if priority > most:
        message = (
            f"jobs of this project may have a priority of up to {most}; lower it, or ask an admin of the box "
            "(`eft quota set project NAME --max-priority …`)"
        )
        raise SpecError(message, field="priority", faults=(Fault("priority_too_high", message, "priority"),))


# -- set


def _row(session: Session, scope: Scope, subject_id: str, values: Mapping[str, Any]) -> None:
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    row = {"scope": scope, "subject_id": subject_id}
    session.execute(dialect.insert(Limit).values(**row).on_conflict_do_nothing())
    if values:
        session.execute(update(Limit).where(Limit.scope == scope, Limit.subject_id == subject_id).values(**values))


def subject(session: Session, scope: Scope, name: str) -> str:
    """Id of a project or user by its name. Raises NotFound."""
    table = Project if scope == "project" else User
    found = session.execute(select(table.id).where(table.name == name)).scalar_one_or_none()
    if found is None:
        raise NotFound(f"there is no {'project' if scope == 'project' else 'user'} `{name[:60]}`", field="name")
    return found


def change(session: Session, actor: Actor, scope: Scope, name: str, values: Mapping[str, Any]) -> Limit:
    """Set some of FIELDS (None: no quota); the others stay. Raises NotFound."""
    subject_id = subject(session, scope, name)
    _row(session, scope, subject_id, values)
    audit.record(session, actor, "limits.set", f"{scope} {name}", dict(values), project_id=None)
    query = select(Limit).where(Limit.scope == scope, Limit.subject_id == subject_id)
    return session.execute(query.execution_options(populate_existing=True)).scalar_one()


def preemptible(session: Session, project_ids: Iterable[str]) -> set[str]:
    """Those of the projects whose running jobs make room for higher priorities (core/jobs/scheduling/preempt.py)."""
    query = select(Limit.subject_id).where(Limit.scope == "project", Limit.preemptible.is_(True))
    return set(session.execute(query.where(Limit.subject_id.in_(list(project_ids)))).scalars())


def set_preemptible(session: Session, actor: Actor, project_id: str, allowed: bool) -> None:
    """Whether they do, from now on."""
    _row(session, "project", project_id, {"preemptible": allowed})
    audit.record(session, actor, "project.set", project_id, {"preemptible": allowed}, project_id=project_id)


def names(session: Session, ids: Iterable[str]) -> dict[str, str]:
    """Names of users and projects by their ids."""
    wanted = sorted(set(ids))
    found: dict[str, str] = {}
    for table in (User, Project):
        found.update(
            (row.id, row.name) for row in session.execute(select(table.id, table.name).where(table.id.in_(wanted)))
        )
    return found


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
