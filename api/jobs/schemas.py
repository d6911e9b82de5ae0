"""What the API says about jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, model_validator

from api.http.body import Body
from api.jobs import plan_schemas
from api.jobs.removal import Deletion
from api.view import view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Artifact, Job
from core.spec.job import JobSpec, Note, Tags

_ID = "job-01kar3v8x5m2h6n9qst4wyz0bc"
_FILE = "file-01kar3v8x5m2h6n9qst4wyz0bc"

SPEC_SHORT: dict[str, Any] = {
    "name": "voice intents",
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data": {"train": _FILE, "eval": _FILE.replace("bc", "bd")},
    "method": "lora",
}
SPEC_LONG: dict[str, Any] = {
    "version": 1,
    "model": {"type": "hub", "id": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "main"},
    "data": {"train": {"type": "file", "id": _FILE, "format": "messages"}},
    "stage": {"type": "sft", "loss_on": "completions"},
    "method": {"type": "lora", "r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "optimizer": {"type": "adamw", "learning_rate": 1e-4},
    "schedule": {"type": "cosine", "warmup_ratio": 0.05},
    "training": {"num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "resources": {"type": "single", "accelerator": "gpu"},
}
SPEC_YAML = f"""\
name: voice intents
model: HuggingFaceTB/SmolLM2-135M-Instruct
data:
  train: {_FILE}
method:
  type: lora
  r: 16
optimizer:
  type: adamw
  learning_rate: 1e-4
"""

ACTIONS = ("events", "metrics", "logs", "artifacts", "pause", "resume", "cancel", "retry")
_PLAN_REASON = "the model as it was prepared here last"
_LINKS = {name: f"/jobs/{_ID}/{name}" for name in ACTIONS}
_JOB: dict[str, Any] = {
    "id": _ID,
    "name": "voice intents",
    "tags": ["baseline"],
    "note": None,
    "archived_at": None,
    "status": "running",
    "reason": "runs on box-1",
    "attempt": 2,
    "training_attempts": 1,
    "created_at": "2026-11-21T09:20:55.004000Z",
    "started_at": "2026-11-21T09:20:57.120000Z",
    "finished_at": None,
    "progress": {"step": 12, "total_steps": 66, "epoch": 0.55, "seconds_left": 81.5},
    "result": None,
    "failure": None,
    "spec": SPEC_LONG,
    "submitted": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "data": _FILE},
    "adjusted": {"training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 8},
    "settled": None,
    "node": "box-1",
    "slots": ["box-1/3"],
    "retry_of": None,
    "pipeline_id": None,
    "sweep_id": None,
    "priority": 0,
    "queue": None,
    "notices": None,
    "links": {"self": f"/jobs/{_ID}", **_LINKS},
}


class JobView(AttributeDocsModel):
    """A job as it is now."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})

    id: str
    name: str | None
    tags: list[str]
    note: str | None
    archived_at: str | None
    """Since when `GET /jobs` leaves it out; null: it does not."""
    status: str
    """queued, preparing, starting, running, pausing, paused, stopping; and final: succeeded, failed, cancelled."""
    reason: str
    """Why it is in this state, for people."""
    attempt: int
    """How many times a worker has taken it up; preparing the model counts as one. Logs are told apart by it."""
    training_attempts: int | None
    """How many of these were to train, from `GET /jobs` and `GET /jobs/{id}` alone."""
    created_at: str
    """ISO 8601, UTC, as all times."""
    started_at: str | None
    finished_at: str | None
    progress: dict[str, Any] | None
    """The trainer's latest: step, total_steps, epoch, seconds_left (null while unknown)."""
    result: dict[str, Any] | None
    """What a job that succeeded has produced."""
    failure: dict[str, Any] | None
    """Why a job failed: class (user, memory, machine, internal), code, message, field."""
    spec: dict[str, Any] | None
    """Resolved: every default is written out (schema JobSpec). Null in lists: `GET /jobs/{id}` has it."""
    submitted: dict[str, Any] | None
    """The spec as it was sent. Null in lists, and for steps of pipelines and runs of sweeps."""
    adjusted: dict[str, int] | None
    """Fields that run changed for want of memory, e.g. `training.per_device_train_batch_size`; `spec` stays."""
    settled: dict[str, Any] | None
    """What `method: auto` has come to, once the job has started (`rung`, `reason`, the axes in `spec`), and why each
    candidate before it was not taken (`rejected`)."""
    node: str | None
    """The box that has it now."""
    slots: list[str] | None
    """The GPUs (or CPU slots) that it has now, from `GET /jobs` and `GET /jobs/{id}` alone; rank 0 is on the first."""
    retry_of: str | None
    """The job that this one tries again."""
    pipeline_id: str | None
    """The pipeline of which it is a step (docs/pipelines.md)."""
    sweep_id: str | None
    """The sweep of which it is a run (docs/sweeps.md)."""
    priority: int
    """Among jobs that wait; a higher one goes first."""
    queue: dict[str, Any] | None
    """While it waits, from `GET /jobs/{id}` alone: position, code, reason, estimated_start, estimated_gpus
    (docs/queue.md)."""
    notices: list[dict[str, Any]] | None
    """From `POST /jobs` alone: what is not wrong with it, but to be known (code, message, field)."""
    links: dict[str, str]


_FREED: dict[str, Any] = {"checkpoints": 1214511104, "artifacts": 19620812, "other": 48211}


class FreedView(AttributeDocsModel):
    """Bytes of its run folder."""

    checkpoints: int
    artifacts: int
    other: int
    """Logs, events and records."""


class ObstacleView(AttributeDocsModel):
    """Why a job cannot be deleted now."""

    code: str
    by: str
    """Id of what needs the job; of the job itself where it has not ended."""
    message: str


class JobDeleted(AttributeDocsModel):
    """What goes with a job, or with `dry_run` would go."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "id": _ID,
                    "name": "intents",
                    "deleted": True,
                    "freed_bytes": _FREED,
                    "model": _ID.replace("job", "model"),
                    "exports": ["gguf"],
                    "obstacles": [],
                }
            ]
        },
    )
    id: str
    name: str | None
    deleted: bool
    """False with `dry_run`."""
    freed_bytes: FreedView
    """Zeros where it was deleted before."""
    model: str | None
    """Its entry in the registry, which goes too."""
    exports: list[str]
    """Folders of exported formats of that model."""
    obstacles: list[ObstacleView]
    """With `dry_run`: why the job cannot be deleted now. Empty where it can."""


class JobChange(Body):
    """What may be changed of a job that has been submitted."""

    priority: int | None = Field(default=None, ge=-100, le=100)
    """Jobs of a higher one go first. A project has a limit (docs/queue.md)."""
    tags: Tags | None = None
    """All tags that it has from now on."""
    note: Note | None = None
    """"" removes it."""
    archived: bool | None = None
    """Hide an ended job from `GET /jobs`, or show it again."""

    @model_validator(mode="after")
    def _something(self) -> JobChange:
        if all(value is None for value in (self.priority, self.tags, self.note, self.archived)):
            raise ValueError("say what to change: `priority`, `tags`, `note` or `archived`")
        return self


class RetryResources(Body):
    max_runtime_seconds: int = Field(ge=1, le=31_536_000)
    """The new job's time limit, in seconds of training."""


class JobRetry(Body):
    """What may change when a job is retried: nothing that its steps depend on."""

    resources: RetryResources | None = None
    """Default: as before."""


class JobPage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [_JOB | {"spec": None}], "has_more": True, "next": _ID}]},
    )
    data: list[JobView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


class DryRun(AttributeDocsModel):
    """What would run; nothing was stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "spec": SPEC_LONG,
                    "dry_run": True,
                    "plan": plan_schemas.EXAMPLE,
                    "plan_reason": _PLAN_REASON,
                    "notices": [],
                }
            ]
        },
    )
    spec: dict[str, Any]
    """Resolved: every default is written out (schema JobSpec)."""
    dry_run: bool
    plan: plan_schemas.PlanView | None
    """What it would take here, by an estimate; null: that is not known."""
    plan_reason: str
    """Where the model's shape is from, or why there is no plan."""
    notices: list[dict[str, Any]]
    """What is not wrong with the job, but to be known: code, message, field."""


_ARTIFACT: dict[str, Any] = {
    "path": "adapter/adapter_model.safetensors",
    "kind": "adapter",
    "bytes": 19560664,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "url": f"/jobs/{_ID}/artifacts/adapter/adapter_model.safetensors",
}


class ArtifactView(AttributeDocsModel):
    """One file the job hands back."""

    path: str
    kind: str
    bytes: int
    sha256: str
    url: str


class ArtifactList(BaseModel):
    """Empty until the job has succeeded."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_ARTIFACT]}]})
    data: list[ArtifactView]


def job_view(
    job: Job,
    queue: dict[str, Any] | None = None,
    slots: list[str] | None = None,
    *,
    training_attempts: int | None = None,
    listed: bool = False,
) -> dict[str, Any]:
    """`listed`: as one of many, without its spec."""
    return view_of(
        JobView,
        job,
        training_attempts=training_attempts,
        spec=None if listed else job.spec,
        submitted=None if listed else job.submitted,
        slots=[] if slots is None and job.node is None else slots,
        queue=queue,
        notices=None,
        links={"self": f"/jobs/{job.id}", **{name: f"/jobs/{job.id}/{name}" for name in ACTIONS}},
    )


def removal_view(removal: Deletion, *, deleted: bool) -> dict[str, Any]:
    return {
        "id": removal.job_id,
        "name": removal.name,
        "deleted": deleted,
        "freed_bytes": asdict(removal.freed),
        "model": removal.model,
        "exports": list(removal.exports),
        "obstacles": [{"code": one.code, "by": one.by, "message": one.words} for one in removal.obstacles],
    }


def artifact_view(artifact: Artifact) -> dict[str, Any]:
    return view_of(ArtifactView, artifact, url=f"/jobs/{artifact.job_id}/artifacts/{quote(artifact.path)}")


def openapi_schemas() -> dict[str, Any]:
    """JobSpec and all it is made of, as OpenAPI components: the body of `POST /jobs`, short forms included."""
    schema = JobSpec.model_json_schema(mode="validation", ref_template="#/components/schemas/{model}")
    parts: dict[str, Any] = schema.pop("$defs")
    return {**parts, "JobSpec": schema}
