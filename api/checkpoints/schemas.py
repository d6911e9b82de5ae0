"""What the API says about checkpoints."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from api.view import iso
from core.base.attribute_docs import AttributeDocsModel
from core.jobs.admission.checkpoints import StoredCheckpoint

_CHECKPOINT: dict[str, Any] = {
    "id": "step-00000050@2",
    "job": "job-01kar3v8x5m2h6n9qst4wyz0bc",
    "step": 50,
    "micro_step": 0,
    "attempt": 2,
    "bytes": 58712064,
    "written_at": "2026-11-21T09:25:31.004000Z",
    "set_aside": False,
}


class CheckpointView(AttributeDocsModel):
    """A complete state of a job's training."""

    model_config = ConfigDict(json_schema_extra={"examples": [_CHECKPOINT]})
    id: str
    """Name of the folder and number of the attempt."""
    job: str
    step: int
    """Optimizer steps done."""
    micro_step: int
    """Backward passes of the next step that are in it."""
    attempt: int
    bytes: int
    written_at: str
    set_aside: bool
    """A trainer found it damaged and used an older one. It is kept for people, and no job starts from it."""


class CheckpointList(BaseModel):
    """The furthest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_CHECKPOINT]}]})
    data: list[CheckpointView]


class CheckpointVerdict(AttributeDocsModel):
    """Whether every file of a checkpoint is as its manifest says."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"id": _CHECKPOINT["id"], "job": _CHECKPOINT["job"], "whole": True, "fault": None}]
        },
    )
    id: str
    job: str
    whole: bool
    fault: str | None
    """What is wrong with it, in words."""


class CheckpointDeleted(BaseModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"id": _CHECKPOINT["id"], "deleted": True, "freed_bytes": 58712064}]}
    )
    id: str
    deleted: bool
    freed_bytes: int


def checkpoint_view(job_id: str, found: StoredCheckpoint) -> dict[str, Any]:
    return {
        "id": found.id,
        "job": job_id,
        "step": found.progress.step,
        "micro_step": found.progress.micro,
        "attempt": found.attempt,
        "bytes": found.bytes,
        "written_at": iso(found.written_at),
        "set_aside": found.bad,
    }
