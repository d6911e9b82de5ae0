"""`GET /jobs/{id}/lineage`: the jobs that a model is made of."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from api.auth.policy import Reading
from api.deps import App
from api.handles import JobId
from api.http.errors import responses
from core.base.attribute_docs import AttributeDocsModel
from core.jobs.admission import lineage
from core.jobs.lifecycle.submit import find

router = APIRouter(tags=["jobs"])

_HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
_GENERATION: dict[str, Any] = {
    "job": "job-01kar3v8x5m2h6n9qst4wyz0bc",
    "name": "voice intents",
    "pipeline": None,
    "stage": "sft",
    "method": "lora",
    "model": {"spec": {"type": "hub", "id": "HuggingFaceTB/SmolLM2-135M-Instruct", "revision": "main"}},
    "spec_sha256": _HASH,
    "data": {"train": [_HASH], "eval": []},
    "template_sha256": _HASH,
    "code": {"eft": "1.0.0", "sha256": _HASH},
    "checkpoint": None,
    "reward_models": [],
    "weights": {"adapter/adapter_model.safetensors": _HASH},
}


class HashedData(BaseModel):
    """SHA-256 of the data files, in the order in which they are read."""

    train: list[str]
    eval: list[str]


class HashedCode(AttributeDocsModel):
    """The code that trained."""

    eft: str | None
    """Version of eft."""
    sha256: str | None
    """SHA-256 over all sources of the trainer."""


class ScoringModel(AttributeDocsModel):
    """A reward model that scored the answers that a job learned from."""

    reward: str
    """Name of the reward."""
    job: str
    """Job that trained it."""
    weights: dict[str, str]
    """SHA-256 of its weights, by path below that job's artifacts."""


class Generation(AttributeDocsModel):
    """One job of a lineage. What no attempt has told yet is null or empty."""

    job: str
    name: str | None
    pipeline: str | None
    """The pipeline of which the job was a step."""
    stage: str
    method: str
    model: dict[str, Any]
    """`spec` as the job names its model, and the `commit` or `sha256` that it had; `jobs` whose weights are in it."""
    spec_sha256: str
    """SHA-256 of the resolved spec, as JSON with sorted keys."""
    data: HashedData
    template_sha256: str | None
    """SHA-256 of the chat template of the trained model."""
    code: HashedCode
    checkpoint: str | None = None
    """The checkpoint with which the job after this one began, instead of its weights (`checkpoint.resume_from`)."""
    reward_models: list[ScoringModel] = Field(default=[])
    """Those of rewards of `type: model` that jobs have trained."""
    weights: dict[str, str]
    """SHA-256 of the weights and their configuration, by path below the artifacts."""


class Lineage(BaseModel):
    """The job itself first, then the jobs that its model is made of, nearest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [_GENERATION]}]})
    data: list[Generation]


@router.get(
    "/jobs/{job_id}/lineage",
    summary="Show what a job's model is made of",
    response_model=Lineage,
    response_class=JSONResponse,
    responses=responses(404),
)
def job_lineage(job_id: JobId, principal: Reading, app: App) -> Response:
    """Hashes of data, spec, chat template, code and weights of the job and of all jobs before it.

    The entries of earlier jobs were stored when this job was submitted, so that they outlive those jobs.
    """
    with app.database.read() as session:
        job = find(session, principal, job_id)
        return JSONResponse({"data": lineage.of_job(session, job)})
