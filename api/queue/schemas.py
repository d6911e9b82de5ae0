"""What is told of the queue, and of the people who share it. Of the GPUs: gpu_schemas.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.fields import Name, Whole
from api.http.body import Body
from api.view import iso, view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Limit
from core.jobs.policies.usage import UsageRow
from core.jobs.views.explain import Explanation

_JOB = "job-01kar3v8x5m2h6n9qst4wyz0bc"

# -- the queue

_PLACE: dict[str, Any] = {
    "position": 3,
    "code": "turn",
    "reason": "needs 1 GPU with bf16; 0 of 2 free; 3rd in line",
    "estimated_start": "2026-11-21T11:40:00.000000Z",
    "estimated_gpus": ["box/0"],
    "priority": 0,
}


class PlaceView(AttributeDocsModel):
    """Why a job waits, and for how long about."""

    model_config = ConfigDict(json_schema_extra={"examples": [_PLACE]})
    position: int | None
    """Among the jobs that the same slots can serve; null: it is not in line, or a thousand jobs are before it."""
    code: str
    """turn, model, requirements, closed, quota, maintenance, disk, later, after or no_worker (docs/queue.md)."""
    reason: str
    """The same in words."""
    estimated_start: str | None
    """By the steps that running jobs have left, time limits, and how long jobs of the project have taken; null: nobody
    can tell."""
    estimated_gpus: list[str]
    """GPUs (or CPU slots) on which it will probably start then."""
    priority: int


_WAITING: dict[str, Any] = {
    **_PLACE,
    "phase": "train",
    "job": _JOB,
    "name": "voice intents",
    "owner": "ada",
    "project": "voice",
    "waiting_since": "2026-11-21T09:20:55.004000Z",
}


class WaitingView(PlaceView):
    """A job in the queue."""

    model_config = ConfigDict(json_schema_extra={"examples": [_WAITING]})
    phase: Literal["train", "prepare", "preview", "export"]
    """What it waits to have done."""
    job: str | None
    """Null for a job of another project."""
    name: str | None
    owner: str | None
    """Name of the owner; of another project's job only for admins of the box."""
    project: str | None
    waiting_since: str


class QueueView(BaseModel):
    """In line first, then what is held."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_WAITING], "more": 0}]})
    data: list[WaitingView]
    more: int
    """How many wait besides these, beyond `limit`."""


def place_view(told: Explanation) -> dict[str, Any]:
    return {
        "position": told.position,
        "code": told.code,
        "reason": told.reason if told.aside is None else f"{told.reason}; {told.aside}",
        "estimated_start": iso(told.estimated_start),
        "estimated_gpus": list(told.estimated_gpus),
        "priority": told.key.priority,
    }


def waiting_view(told: Explanation, names: Mapping[str, str], project_id: str, operates: bool) -> dict[str, Any]:
    """A waiting job as it is shown; of another project's job only its place in the queue."""
    row, mine = told.job, told.job.project_id == project_id
    shown = place_view(told)
    if not mine:
        shown["reason"] = told.reason
    if not mine and not operates and told.code == "quota":
        shown["reason"] = "a quota is used up"
    if not mine and told.code == "later":
        shown["reason"] = "is tried again later"  # what went wrong is the project's own affair
    return {
        **shown,
        "phase": told.phase,
        "job": row.id if mine else None,
        "name": row.name if mine else None,
        "owner": names.get(row.owner_id) if mine or operates else None,
        "project": names.get(row.project_id) if mine or operates else None,
        "waiting_since": iso(row.created_at),
    }


# -- usage and limits

_USAGE: dict[str, Any] = {
    "owner": "ada",
    "project": "voice",
    "gpu_hours": 41.5,
    "cpu_hours": 0.0,
    "running": 1,
    "queued": 3,
    "disk_bytes": 73014444032,
    "counted_hours": 18.2,
}


class UsageView(AttributeDocsModel):
    """Usage of an owner in a project."""

    owner: str
    project: str
    gpu_hours: float
    """In the days asked for (UTC)."""
    cpu_hours: float
    """Hours of training on CPU slots."""
    running: int
    """Jobs now."""
    queued: int
    """Now, with those that are being prepared or are paused."""
    disk_bytes: int
    """Files and run folders, measured every ten minutes."""
    counted_hours: float
    """Hours of the owner in all projects, as fair share counts them now: older use counts less."""


class UsageList(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"since": "2026-11-15", "until": "2026-11-21", "data": [_USAGE]}]}
    )
    since: str
    until: str
    data: list[UsageView]


def usage_view(row: UsageRow, names: Mapping[str, str]) -> dict[str, Any]:
    hours = {name: round(getattr(row, name), 4) for name in ("gpu_hours", "cpu_hours", "counted_hours")}
    owner, project = (names.get(number, number) for number in (row.owner_id, row.project_id))
    return view_of(UsageView, row, owner=owner, project=project, **hours)


_LIMIT: dict[str, Any] = {
    "scope": "project",
    "name": "voice",
    "shares": None,
    "max_priority": 10,
    "max_running": 2,
    "max_queued": None,
    "max_previews": None,
    "max_sessions": None,
    "max_adapters": None,
    "session_hours_week": None,
    "session_bytes": None,
    "gpu_hours_week": 100.0,
    "disk_bytes": None,
    "preemptible": None,
}


class NewLimit(Body):
    """What is given is set; null takes a quota away."""

    scope: Literal["project", "owner"]
    name: Name
    """Name of the project or user."""
    shares: float | None = Field(default=None, gt=0, le=1_000_000)
    """Shares of an owner; null: 1. Twice the shares give twice the GPU time before others go first."""
    max_priority: int | None = Field(default=None, ge=-100, le=100)
    """Highest priority of a project's jobs; null: 10."""
    max_running: int | None = Field(default=None, ge=0, le=1_000_000)
    max_queued: int | None = Field(default=None, ge=0, le=1_000_000)
    max_previews: int | None = Field(default=None, ge=0, le=1_000_000)
    """Previews that wait or run at once; others are refused. Of a project, null: EFT_MAX_PREVIEWS."""
    max_sessions: int | None = Field(default=None, ge=0, le=1_000_000)
    """Open sessions, parked ones too; others are refused (docs/sessions.md). Of an owner, null: EFT_MAX_SESSIONS."""
    max_adapters: int | None = Field(default=None, ge=0, le=1_000_000)
    """Adapters in open sessions; others are refused."""
    session_hours_week: float | None = Field(default=None, ge=0, le=1e9)
    """Hours for which sessions hold slots, in seven days; then all operations but `save` are refused."""
    session_bytes: Whole | None = None
    """Bytes of operations and results of sessions, as long as they are kept; beyond it operations with arrays are
    refused."""
    gpu_hours_week: float | None = Field(default=None, ge=0, le=1e9)
    disk_bytes: Whole | None = None
    preemptible: bool | None = None
    """Whether running jobs of a project may be paused, with a checkpoint, for waiting ones of a higher priority
    (docs/queue.md); null: no. Admins of the project may set it too (`PATCH /projects/{project}`)."""

    @model_validator(mode="after")
    def _of_a_project(self) -> NewLimit:
        if self.scope == "owner" and self.preemptible is not None:
            raise ValueError("`preemptible` is a project's: give `scope: project`")
        return self


class LimitView(AttributeDocsModel):
    """Shares and quotas of a project or an owner; null: none."""

    model_config = ConfigDict(json_schema_extra={"examples": [_LIMIT]})
    scope: str
    name: str
    shares: float | None
    max_priority: int | None
    max_running: int | None
    max_queued: int | None
    max_previews: int | None
    max_sessions: int | None
    max_adapters: int | None
    session_hours_week: float | None
    session_bytes: int | None
    gpu_hours_week: float | None
    disk_bytes: int | None
    preemptible: bool | None


class LimitList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_LIMIT]}]})
    data: list[LimitView]


def limit_view(row: Limit, names: Mapping[str, str]) -> dict[str, Any]:
    return view_of(LimitView, row, name=names.get(row.subject_id, row.subject_id))


# -- retention

_REMOVAL: dict[str, Any] = {
    "kind": "checkpoints",
    "id": "job-01kar3v8x5m2h6n9qst4wyz0bc",
    "bytes": 4294967296,
    "why": "its job ended more than 30 days ago",
}


class RemovalView(AttributeDocsModel):
    kind: str
    """checkpoints (with artifacts that no job lists), preview, file, or history (curves, logs, events)."""
    id: str
    """Id of the job, the preview or the file."""
    bytes: int
    why: str


class Collected(AttributeDocsModel):
    """What went, or with `dry_run` would go."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"dry_run": True, "bytes": 4294967296, "data": [_REMOVAL]}]},
    )
    dry_run: bool
    bytes: int
    data: list[RemovalView]
