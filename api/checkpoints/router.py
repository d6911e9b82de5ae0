"""`/jobs/{id}/checkpoints`: the states of a job's training that are kept."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.checkpoints import schemas, service
from api.deps import App
from api.handles import JobId
from api.http.errors import responses
from core.jobs.admission import checkpoints
from core.jobs.lifecycle.submit import find

router = APIRouter(tags=["jobs"])

CheckpointId = Annotated[
    str,
    Path(
        max_length=80,
        description="Id as listed, the name without the attempt, a number of steps, or `last`.",
        examples=["step-00000050@2"],
    ),
]


@router.get(
    "/jobs/{job_id}/checkpoints",
    summary="List a job's checkpoints",
    response_model=schemas.CheckpointList,
    response_class=JSONResponse,
    responses=responses(404),
)
def list_checkpoints(job_id: JobId, principal: Reading, app: App) -> Response:
    """All that are complete, over all attempts, and those that were set aside because they were damaged."""
    with app.database.read() as session:
        find(session, principal, job_id)
    found = checkpoints.of_job(app.store, job_id)
    return JSONResponse({"data": [schemas.checkpoint_view(job_id, one) for one in found]})


@router.get(
    "/jobs/{job_id}/checkpoints/{checkpoint_id}/verify",
    summary="Verify a checkpoint",
    response_model=schemas.CheckpointVerdict,
    response_class=JSONResponse,
    responses=responses(404),
)
def verify_checkpoint(job_id: JobId, checkpoint_id: CheckpointId, principal: Reading, app: App) -> Response:
    """Read every file and compare it with its size and SHA-256 in the manifest. Nothing is changed."""
    with app.database.read() as session:
        find(session, principal, job_id)
    known = checkpoints.of_job(app.store, job_id)
    found = checkpoints.choose(known, checkpoint_id, job_id, "checkpoint_id", damaged=True)
    wrong = checkpoints.fault(app.store, found)
    return JSONResponse({"id": found.id, "job": job_id, "whole": wrong is None, "fault": wrong})


@router.delete(
    "/jobs/{job_id}/checkpoints/{checkpoint_id}",
    summary="Delete a checkpoint",
    response_model=schemas.CheckpointDeleted,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def delete_checkpoint(job_id: JobId, checkpoint_id: CheckpointId, principal: Writing, app: App) -> Response:
    """Delete one checkpoint of a job that has ended. Rejected while another job may go on from it."""
    return JSONResponse(
        service.delete(app.database, app.settings, app.layout, app.store, principal, job_id, checkpoint_id)
    )
