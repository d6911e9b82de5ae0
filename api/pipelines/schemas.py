"""What the API says about pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from api.http.body import Body
from api.jobs.schemas import SPEC_LONG
from api.view import view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Job, Pipeline, PipelineEvent, PipelineStep
from core.spec.pipeline import PipelineSpec

_PIPE, _JOB = "pipe-01kar3v8x5m2h6n9qst4wyz0bc", "job-01kar3v8x5m2h6n9qst4wyz0bc"
_FILE = "file-01kar3v8x5m2h6n9qst4wyz0bc"
EXAMPLE: dict[str, Any] = {
    "name": "voice intents",
    "steps": [
        {
            "name": "general",
            "job": {
                "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
                "data": {"train": _FILE, "split": {"eval_fraction": 0.1}},
            },
            "gates": [{"metric": "eval_loss", "max": 2.5}],
        },
        {"name": "intents", "job": {"data": _FILE}},
    ],
}
_NOW = "2026-11-21T09:20:55.004000Z"
_STEPS: list[dict[str, Any]] = [
    {
        "name": "general",
        "status": "succeeded",
        "job": _JOB,
        "gates": [{"metric": "eval_loss", "min": None, "max": 2.5, "value": 2.11, "passed": True}],
    },
    {"name": "intents", "status": "running", "job": _JOB.replace("bc", "bd"), "gates": []},
]
VIEW: dict[str, Any] = {
    "id": _PIPE,
    "name": "voice intents",
    "status": "running",
    "reason": "step 2 of 2, `intents`",
    "steps": _STEPS,
    "retry_of": None,
    "created_at": _NOW,
    "finished_at": None,
    "links": {"self": f"/pipelines/{_PIPE}", "events": f"/pipelines/{_PIPE}/events"},
}


class GateView(AttributeDocsModel):
    """A gate, and what came of it."""

    metric: str
    min: float | None
    max: float | None
    value: float | None
    """The figure of the step's result; null until the step has succeeded, and where the result does not have it."""
    passed: bool | None
    """Null until the step has succeeded."""


class StepView(AttributeDocsModel):
    """One step."""

    name: str
    status: str
    """`waiting` until its job is submitted; then the status of the job."""
    job: str | None
    """Id of its job."""
    gates: list[GateView]


class PipelineView(AttributeDocsModel):
    """A pipeline as it is now."""

    model_config = ConfigDict(json_schema_extra={"examples": [VIEW]})
    id: str
    name: str | None
    status: str
    """running; and final: succeeded, failed, cancelled."""
    reason: str
    """Why it is in this state, for people."""
    steps: list[StepView]
    retry_of: str | None
    """The pipeline that this one tries again."""
    created_at: str
    finished_at: str | None
    links: dict[str, str]


class PipelinePage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [VIEW], "has_more": False, "next": None}]},
    )
    data: list[PipelineView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


class PipelineDeleted(BaseModel):
    """The pipeline is gone; its jobs are still there."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": _PIPE, "deleted": True}]})
    id: str
    deleted: bool


class PipelineDryRun(AttributeDocsModel):
    """What would run; nothing was stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"dry_run": True, "steps": [{"name": "general", "gates": [], "job": SPEC_LONG}]}]
        },
    )
    dry_run: bool
    steps: list[dict[str, Any]]
    """Name, gates and resolved job of each. Where a job starts from another step, `model.id` stands for that step."""


class PipelineRetryWish(Body):
    """Where to begin."""

    start: str | None = Field(default=None, alias="from", max_length=50)
    """Name of the step from which everything is done anew. Default: the step at which the pipeline ended; a job that
    failed goes on from its newest checkpoint."""


class PipelineEventView(AttributeDocsModel):
    """One thing that happened to a pipeline."""

    seq: int
    """Counts from 1 without gaps; the id of a server-sent event."""
    type: str
    """`status`; `step` when a job was submitted; `waiting` when the next one cannot be submitted yet."""
    time: str
    data: dict[str, Any]


class PipelineEventPage(AttributeDocsModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "data": [{"seq": 2, "type": "step", "time": _NOW, "data": {"step": "general", "job": _JOB}}],
                    "has_more": False,
                    "next": 2,
                }
            ]
        },
    )
    data: list[PipelineEventView]
    has_more: bool
    next: int | None
    """Give it as `after` to go on; null when the page is empty."""


def pipeline_view(pipeline: Pipeline, steps: Sequence[PipelineStep], jobs: Mapping[str, Job]) -> dict[str, Any]:
    return view_of(
        PipelineView,
        pipeline,
        steps=[_step_view(step, jobs) for step in steps],
        links={"self": f"/pipelines/{pipeline.id}", "events": f"/pipelines/{pipeline.id}/events"},
    )


def _step_view(step: PipelineStep, jobs: Mapping[str, Job]) -> dict[str, Any]:
    job = None if step.job_id is None else jobs.get(step.job_id)
    status = "waiting" if step.job_id is None else "deleted" if job is None else job.status
    held = {one["metric"]: one for one in step.passed or ()}
    gates = [
        {**gate, "value": None, "passed": None} | held.get(gate["metric"], {}) for gate in step.gates
    ]  # fmt: skip
    return {"name": step.name, "status": status, "job": step.job_id, "gates": gates}


def event_view(event: PipelineEvent) -> dict[str, Any]:
    return view_of(PipelineEventView, event)


def openapi_schemas() -> dict[str, Any]:
    """PipelineSpec and all it is made of, as OpenAPI components: the body of `POST /pipelines`."""
    schema = PipelineSpec.model_json_schema(mode="validation", ref_template="#/components/schemas/{model}")
    parts: dict[str, Any] = schema.pop("$defs")
    return {**parts, "PipelineSpec": schema}
