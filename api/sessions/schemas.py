"""What the API says about sessions."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict

from api.view import iso
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import SessionOperation
from core.jobs.lifecycle.sessions.records import FoundSession
from core.spec.session.verbs import Verbs

_SESSION, _NOW = "session-01kar3v8x5m2h6n9qst4wyz0bc", "2026-11-23T09:20:55.004000Z"
EXAMPLE: dict[str, Any] = {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"}
VIEW: dict[str, Any] = {
    "id": _SESSION,
    "name": None,
    "status": "running",
    "reason": "runs on box-1",
    "spec": EXAMPLE,
    "operations": 12,
    "snapshot": 0,
    "log_bytes": 4096,
    "created_at": _NOW,
    "used_at": _NOW,
    "finished_at": None,
    "failure": None,
    "links": {"self": f"/sessions/{_SESSION}", "operations": f"/sessions/{_SESSION}/operations"},
}
OPERATION: dict[str, Any] = {
    "session": _SESSION,
    "position": 2,
    "model": "a",
    "seq": 1,
    "status": "done",
    "session_status": "running",
    "reason": "runs on box-1",
    "operation": {"op": "forward_backward", "model": "a", "loss": {"type": "cross_entropy"}},
    "result": {"loss": 12.5, "targets": 3, "micro_steps": 1},
    "error": None,
    "arrays": {"logprobs": [-4.1, -4.2, -4.2, 0.0]},
    "links": {"self": f"/sessions/{_SESSION}/operations/2"},
}


def _fields_of_operations() -> str:
    parts = []
    for arm in get_args(Verbs):
        fields = [name for name in arm.model_fields if name != "op"]
        parts.append(f"{arm.model_fields['op'].default} ({', '.join(fields)})")
    return "; ".join(parts)


OPERATION_BODY: dict[str, Any] = {
    "type": "object",
    "required": ["seq", "operation"],
    "properties": {
        "seq": {
            "type": "integer",
            "minimum": 0,
            "description": "Number of the operation, counted for each `model` from 1. The same number again is the "
            "same operation, and answers its result.",
        },
        "operation": {
            "type": "object",
            "required": ["op"],
            "description": f"`op` and its fields: {_fields_of_operations()}.",
        },
        "arrays": {
            "type": "object",
            "additionalProperties": {"type": "array", "items": {"type": "number"}},
            "description": "Flat arrays, example after example: `tokens` and `lengths`, and `targets`, `weights`, "
            "`logprobs`, `advantages` for losses that take them.",
        },
    },
}


class SessionView(AttributeDocsModel):
    """A training loop that runs elsewhere, and its place on the box."""

    model_config = ConfigDict(json_schema_extra={"examples": [VIEW]})
    id: str
    name: str | None
    status: str
    """queued, preparing, starting, running, parking, parked, closing; and final: closed, failed."""
    reason: str
    spec: dict[str, Any]
    operations: int
    """Operations accepted so far."""
    snapshot: int
    """Position of the operation up to which a snapshot has all."""
    log_bytes: int
    """Bytes of tensors that were sent and answered."""
    created_at: str
    used_at: str
    """When an operation came or was answered last; while it is parked, also when a program of Tinker's SDK last said
    that it lives."""
    finished_at: str | None
    failure: dict[str, Any] | None
    """Once it has failed: class, code, message, field."""
    links: dict[str, str]


class SessionPage(BaseModel):
    """Newest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [VIEW], "has_more": False, "next": None}]})
    data: list[SessionView]
    has_more: bool
    next: str | None


class OperationView(AttributeDocsModel):
    """An operation that was accepted, and its result once there is one."""

    model_config = ConfigDict(json_schema_extra={"examples": [OPERATION]})
    session: str
    position: int
    """Its place in the session's log: operations are computed in this order."""
    model: str | None
    seq: int
    status: str
    """waiting, done or failed."""
    session_status: str
    reason: str
    """What the session does or waits for."""
    operation: dict[str, Any]
    result: dict[str, Any] | None
    error: dict[str, Any] | None
    """Once it has failed: code, message, field. Nothing has changed then."""
    arrays: dict[str, list[float]]
    """Flat arrays of the result."""
    links: dict[str, str]


def session_view(found: FoundSession) -> dict[str, Any]:
    row, job = found.row, found.job
    return {
        "id": row.id,
        "name": job.name,
        "status": found.status,
        "reason": job.reason,
        "spec": row.spec,
        "operations": row.positions,
        "snapshot": row.snapshot,
        "log_bytes": row.log_bytes,
        "created_at": iso(job.created_at),
        "used_at": iso(row.used_at),
        "finished_at": iso(job.finished_at),
        "failure": job.failure,
        "links": {"self": f"/sessions/{row.id}", "operations": f"/sessions/{row.id}/operations"},
    }


def operation_view(found: FoundSession, row: SessionOperation) -> dict[str, Any]:
    """The view without its arrays."""
    status = "waiting" if row.done_at is None else "done" if row.error is None else "failed"
    return {
        "session": row.session_id,
        "position": row.position,
        "model": row.model or None,
        "seq": row.seq,
        "status": status,
        "session_status": found.status,
        "reason": found.job.reason,
        "operation": row.operation,
        "result": row.result,
        "error": row.error,
        "links": {"self": f"/sessions/{row.session_id}/operations/{row.position}"},
    }
