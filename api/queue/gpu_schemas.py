"""What is told of the GPUs, of those who hold them, and of times in which nothing runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from api.fields import Moment, Name, Slot, Words
from api.http.body import Body
from api.view import iso
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Hold, Maintenance
from core.jobs.policies.holds import NamedHold
from core.jobs.scheduling.cluster import SlotState

_JOB = "job-01kar3v8x5m2h6n9qst4wyz0bc"

# -- GPUs

_PROCESS = {"pid": 4711, "user": "bob", "name": "python", "bytes": 8589934592}
_HOLD: dict[str, Any] = {
    "gpu": "box-1/3",
    "node": "box-1",
    "slot": "GPU-5b8f1c",
    "kind": "hold",
    "for": "bob",
    "why": "notebook",
    "by": "ada",
    "since": "2026-11-21T09:20:57.120000Z",
    "until": "2026-11-21T18:00:00.000000Z",
    "released_at": None,
}
_GPU: dict[str, Any] = {
    "gpu": "box-1/3",
    "node": "box-1",
    "slot": "GPU-5b8f1c",
    "kind": "gpu",
    "vendor": "amd",
    "arch": "gfx942",
    "name": "AMD Instinct MI300X",
    "memory_bytes": 206141652992,
    "bf16": True,
    "labels": ["fast"],
    "state": "held",
    "reason": "held until 18:00 UTC for bob (notebook)",
    "job": None,
    "processes": [],
    "busy_percent": 0,
    "used_bytes": 297795584,
    "celsius": 41,
    "watts": 133,
}


class ProcessView(AttributeDocsModel):
    pid: int
    user: str | None
    name: str | None
    bytes: int
    """GPU memory that the process uses, in steps of 256 MiB."""


class GpuView(AttributeDocsModel):
    """A slot that trains: a GPU, or the CPU of a box without one."""

    model_config = ConfigDict(json_schema_extra={"examples": [_GPU]})
    gpu: str
    """Its name for `eft gpu`: NODE/INDEX."""
    node: str
    slot: str
    kind: Literal["gpu", "cpu"]
    vendor: str
    arch: str
    name: str
    memory_bytes: int
    bf16: bool
    labels: list[str]
    state: str
    """free, busy, held, drained, maintenance, quarantined, outside (used by somebody beside eft) or silent."""
    reason: str | None
    """Why nothing is claimed on it."""
    job: str | None
    """The job that has it, if it is of this project."""
    processes: list[ProcessView]
    """Processes of people who use the GPU beside eft."""
    busy_percent: int | None
    """Utilisation as its driver says it, at most a few seconds ago. Null: the driver does not say, as of a partition, a
    MIG slice and the CPU, or the worker is silent."""
    used_bytes: int | None
    """Memory of the GPU in use by any process, bytes; null as above."""
    celsius: int | None
    """Temperature: of the hottest spot of an AMD card, of the GPU of an NVIDIA card; null as above."""
    watts: int | None
    """Power that the card draws; null as above."""


class GpuList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_GPU]}]})
    data: list[GpuView]


class SpanView(AttributeDocsModel):
    """A time in which a GPU was not free."""

    what: Literal["job", "hold", "drain"]
    job: str | None
    """If it is of this project."""
    by: str | None
    """Owner of the job (of this project's), or who asked for the hold."""
    why: str | None
    since: str
    until: str | None
    """Null: it goes on."""


_SPAN: dict[str, Any] = {
    "what": "job",
    "job": _JOB,
    "by": "ada",
    "why": None,
    "since": "2026-11-21T09:20:57.120000Z",
    "until": "2026-11-21T10:02:11.500000Z",
}


class SpanList(BaseModel):
    """Newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_SPAN]}]})
    data: list[SpanView]


def gpu_view(seat: SlotState, project_id: str) -> dict[str, Any]:
    slot = seat.slot
    return {
        "gpu": seat.label,
        "node": seat.node,
        "slot": slot.id,
        "kind": slot.kind,
        "vendor": slot.vendor,
        "arch": slot.arch,
        "name": seat.gpu.get("name") or slot.id,
        "memory_bytes": slot.memory_bytes,
        "bf16": slot.bf16,
        "labels": sorted(slot.labels),
        "state": seat.state,
        "reason": seat.closed,
        "job": seat.busy if seat.busy_project == project_id else None,
        "processes": [{key: process.get(key) for key in _PROCESS} for process in seat.processes],
        "busy_percent": seat.live.get("busy_percent"),
        "used_bytes": seat.live.get("used_bytes"),
        "celsius": seat.live.get("celsius"),
        "watts": seat.live.get("watts"),
    }


# -- holds


class NewHold(Body):
    """GPUs that eft is to leave alone."""

    gpus: list[Slot] = Field(min_length=1, max_length=64)
    """NODE/INDEX, NODE/UUID, or INDEX alone where one node has it."""
    until: Moment | None = None
    """ISO 8601 with its offset; null: until it is released, or after EFT_HOLD_HOURS for anybody who is not an admin of
    the box."""
    held_for: Words = Field(default="", max_length=100, alias="for")
    """The person for whom it is held."""
    why: Words = ""
    now: bool = False
    """Ask the job that has it to leave: it writes a checkpoint and goes on elsewhere. Another project's job leaves
    only for an admin of the box."""


class NewDrain(Body):
    """GPUs to take out of service."""

    gpus: list[Slot] = Field(min_length=1, max_length=64)
    why: Words = ""


class Release(Body):
    """GPUs that eft may use again."""

    gpus: list[Slot] = Field(min_length=1, max_length=64)


class HoldView(AttributeDocsModel):
    """A GPU that somebody has taken out of the queue."""

    model_config = ConfigDict(json_schema_extra={"examples": [_HOLD]})
    gpu: str
    node: str
    slot: str
    kind: Literal["hold", "drain"]
    held_for: str = Field(alias="for")
    why: str
    by: str
    """The user who made the hold."""
    since: str
    until: str | None
    released_at: str | None


class HoldList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_HOLD]}]})
    data: list[HoldView]


def hold_view(held: NamedHold, labels: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    row: Hold = held.hold
    return {
        "gpu": labels.get((row.node, row.slot), f"{row.node}/{row.slot}"),
        "node": row.node,
        "slot": row.slot,
        "kind": row.kind,
        "for": row.held_for,
        "why": row.why,
        "by": held.user,
        "since": iso(row.created_at),
        "until": iso(row.until),
        "released_at": iso(row.released_at),
    }


# -- maintenance

_MAINTENANCE: dict[str, Any] = {
    "id": "maint-01kar3v8x5m2h6n9qst4wyz0bc",
    "node": "box-1",
    "from": "2026-11-22T08:00:00.000000Z",
    "until": "2026-11-22T10:00:00.000000Z",
    "why": "new fans",
    "cancelled_at": None,
}


class NewMaintenance(Body):
    """A time in which nothing runs on a node."""

    node: Slot | None = Field(default=None, max_length=255)
    """Null: all of them."""
    starts_at: Moment = Field(alias="from")
    """ISO 8601 with its offset."""
    until: Moment
    why: Words = ""


class CancelMaintenance(Body):
    id: Name = Field(max_length=40)


class MaintenanceView(AttributeDocsModel):
    """No job whose time limit reaches into it is started, and what runs when it begins goes on later or elsewhere."""

    model_config = ConfigDict(json_schema_extra={"examples": [_MAINTENANCE]})
    id: str
    node: str | None
    """Null: all."""
    starts_at: str = Field(alias="from")
    until: str
    why: str
    cancelled_at: str | None


class MaintenanceList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_MAINTENANCE]}]})
    data: list[MaintenanceView]


def maintenance_view(row: Maintenance) -> dict[str, Any]:
    times = {"from": iso(row.starts_at), "until": iso(row.ends_at)}
    return {"id": row.id, "node": row.node, **times, "why": row.why, "cancelled_at": iso(row.cancelled_at)}
