"""`/jobs/{id}/samples`: what the model answered at each evaluation, base against tuned."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict

from api.auth.policy import Reading
from api.deps import App
from api.handles import JobId
from api.http.errors import responses
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Job
from core.errors import NotFound
from core.jobs.lifecycle.submit import find
from core.jobs.views import queries

router = APIRouter(tags=["jobs"])

_SAMPLE: dict[str, Any] = {
    "row": 12,
    "prompt": "user\nlights on\nassistant\n",
    "reference": "lights.on",
    "base": "Sure! I can help with the lights.",
    "tuned": "lights.on",
    "finished": True,
}


class SampleView(AttributeDocsModel):
    """One prompt and its answers."""

    row: int | None
    """Index of the held-out row, from 0; null for a prompt of the spec."""
    prompt: str
    reference: str | None
    """What the row says."""
    base: str | None
    """The untrained model; null without `evaluation.at_start`."""
    tuned: str
    """The model after `step`."""
    finished: bool
    """The tuned model ended by itself, before `max_new_tokens`."""


class SampleList(AttributeDocsModel):
    """Answers beside each other."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"steps": [0, 50, 100], "step": 100, "data": [_SAMPLE]}]},
    )
    steps: list[int]
    """Evaluations that there are samples of; 0 is the untrained model."""
    step: int | None
    """Step of the checkpoint whose answers stand as `tuned`; null while there are none."""
    data: list[SampleView]


@router.get(
    "/jobs/{job_id}/samples",
    summary="Samples of a job",
    response_model=SampleList,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def job_samples(
    job_id: JobId,
    principal: Reading,
    app: App,
    step: Annotated[
        int | None,
        Query(ge=0, le=2**31 - 1, description="After this step. Default: that of the exported weights, or the newest."),
    ] = None,
) -> Response:
    """The samples of `evaluation.samples`: those of the untrained model beside those of a later step."""
    with app.database.read() as session:
        job = find(session, principal, job_id)
        told = queries.samples(session, job_id)
        chosen = step if step is not None else _handed_back(job, told)
    steps = sorted(told)
    if step is not None and step not in told:
        shown = ", ".join(map(str, steps[-20:])) or "none"
        raise NotFound(f"there are no samples of step {step}; there are of: {shown}", field="step")
    base = told.get(0, [])
    data = [
        {
            "row": one["row"],
            "prompt": one["prompt"],
            "reference": one["reference"],
            "base": base[place]["completion"] if place < len(base) else None,
            "tuned": one["completion"],
            "finished": one["finished"],
        }
        for place, one in enumerate(told.get(chosen, []) if chosen is not None else [])
    ]
    return JSONResponse({"steps": steps, "step": chosen, "data": data})


def _handed_back(job: Job, told: dict[int, Any]) -> int | None:
    best = (job.result or {}).get("best") or {}
    if best.get("restored") and best["step"] in told:
        return int(best["step"])
    return max(told, default=None)
