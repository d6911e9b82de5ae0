"""What a project may leave in the database. Quotas hold jobs (core/jobs/policies/quotas.py); these bounds refuse them.

The bytes of a project's specs are counted in its own row, in the transaction of every submit and every deletion. On
PostgreSQL that row is locked from the count on, so that two submits at once cannot both be the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import case, func, select, update
from sqlalchemy.orm import Session

from core.db.tables import Job, Limit, Project
from core.errors import EftError, NoSpace
from core.jobs.base.states import Status
from core.jobs.policies import quotas
from core.settings import Settings


class QueueFull(EftError):
    """As many jobs or previews of the project wait as may wait."""

    code = "queue_full"
    status = 429


class SpecsFull(NoSpace):
    """The specs of the project's jobs take as much as they may take."""

    code = "specs_full"


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """Limits of one project; 0: no limit."""

    waiting: int = 0
    """Jobs in the queue."""
    previews: int = 0
    """Previews that wait or run, unless a quota of the project or of their owner says less or more."""
    spec_bytes: int = 0
    """Specs of all its jobs and previews, as JSON."""

    @classmethod
    def of(cls, settings: Settings) -> VolumeLimits:
        return cls(settings.max_waiting_jobs, settings.max_previews, settings.max_spec_bytes)


NO_BOUNDS = VolumeLimits()


def size(document: Mapping[str, Any]) -> int:
    """Bytes of a spec as it is stored."""
    return len(json.dumps(document))


def add(session: Session, project_id: str, document: Mapping[str, Any], bounds: VolumeLimits = NO_BOUNDS) -> None:
    """Count a new job's spec. Raises SpecsFull."""
    more = size(document)
    counted = update(Project).where(Project.id == project_id).values(spec_bytes=Project.spec_bytes + more)
    found = session.execute(
        counted.returning(Project.spec_bytes).execution_options(synchronize_session=False)
    ).scalar_one()
    if bounds.spec_bytes and found > bounds.spec_bytes:
        raise SpecsFull(
            f"the specs of this project's jobs take {_mb(found - more)} of {_mb(bounds.spec_bytes)} "
            f"(EFT_MAX_SPEC_BYTES), and this one has {_mb(more)}: delete jobs that are no longer needed (`eft delete`)",
            needs_bytes=more,
        )


def drop(session: Session, project_id: str, document: Mapping[str, Any]) -> None:
    """A job goes, and its spec with it."""
    left = Project.spec_bytes - size(document)
    counted = update(Project).where(Project.id == project_id).values(spec_bytes=case((left < 0, 0), else_=left))
    session.execute(counted.execution_options(synchronize_session=False))


def require_room(
    session: Session,
    project_id: str,
    bounds: VolumeLimits,
    kind: Literal["train", "export", "session", "serving", "trial"] = "train",
) -> None:
    """Raises QueueFull before a job, or an export, is put in the queue. Call it behind `add`, which takes the lock."""
    noun = "jobs" if kind == "train" else f"{kind}s"
    if bounds.waiting and _waiting(session, project_id, kind) >= bounds.waiting:
        raise QueueFull(
            f"{bounds.waiting:,} {noun} of this project wait already, which is the limit (EFT_MAX_WAITING_JOBS): "
            "submit again when some have started, or cancel some"
        )


def require_preview(session: Session, project_id: str, owner_id: str, bounds: VolumeLimits) -> None:
    """Raises QueueFull before a preview is put in the queue."""
    held = {
        row.scope: row.max_previews
        for row in session.execute(quotas.of(owner_id, project_id, Limit.scope, Limit.max_previews))
        if row.max_previews is not None
    }
    by_default = {"project": bounds.previews} if bounds.previews and "project" not in held else {}
    for scope, most in (held | by_default).items():
        whose = Job.project_id == project_id if scope == "project" else Job.owner_id == owner_id
        active = select(func.count()).select_from(Job).where(Job.kind == "preview", whose)
        waits = session.execute(active.where(Job.status == Status.QUEUED.value)).scalar_one()
        runs = session.execute(active.where(Job.lease_until.is_not(None))).scalar_one()
        if waits + runs >= most:
            setting = "EFT_MAX_PREVIEWS" if scope in by_default else "`eft quota list`"
            raise QueueFull(
                f"{most:,} previews of this {scope} may wait or run at once ({setting}), and {waits + runs:,} do: "
                "ask again when one has ended"
            )


def _waiting(session: Session, project_id: str, kind: str) -> int:
    query = select(func.count()).select_from(Job).where(Job.status == Status.QUEUED.value)
    return int(session.execute(query.where(Job.project_id == project_id, Job.kind == kind)).scalar_one())


def _mb(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
