"""What a job has to show: `/jobs/{id}/metrics`, `/logs` and `/artifacts`."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading
from api.deps import App
from api.errors import BadRequest
from api.fields import cell
from api.handles import JobId
from api.http.errors import responses
from api.jobs import schemas
from api.jobs.output import logs
from api.jobs.output.artifact_reply import DOWNLOAD, artifact_reply
from core.errors import NotFound
from core.jobs.lifecycle.submit import find
from core.jobs.views import queries
from core.jobs.views.curves import curves

router = APIRouter(tags=["jobs"])


@router.get(
    "/jobs/{job_id}/metrics",
    summary="Metrics of a job",
    response_model=dict[str, list[tuple[int, float]]],
    response_class=Response,
    responses={
        200: {
            "description": "Per name the pairs of step and value.",
            "content": {
                "application/json": {"example": {"loss": [[1, 2.91], [2, 2.44]], "learning_rate": [[1, 0.0001]]}},
                "text/csv": {"schema": {"type": "string"}, "example": "name,step,value\nloss,1,2.91\n"},
            },
        },
        **responses(404, 422),
    },
)
def job_metrics(
    request: Request,
    job_id: JobId,
    principal: Reading,
    app: App,
    names: Annotated[
        str | None, Query(max_length=2000, pattern=r"^[^\x00]*$", description="Only these, with commas between.")
    ] = None,
    points: Annotated[int | None, Query(ge=2, le=100_000, description="At most so many of each.")] = None,
    clock: Annotated[bool, Query(description="Also `seconds`: when each step was reported, after the first.")] = False,
    first_step: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Steps from this one on.")] = None,
    last_step: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Steps up to this one.")] = None,
    format: Annotated[Literal["json", "csv"] | None, Query(description="Or by `Accept: text/csv`.")] = None,
) -> Response:
    """Loss, learning rate, gradient norm, tokens per second and the trainer's other metrics, by optimizer step.

    With `points` every series is thinned out by min-max buckets: the first and the last point stay, and of each
    of (points - 2) / 2 runs of about equal length the smallest and the largest value, so that no spike is lost. Where
    several attempts did a step, the latest one's value stands.
    """
    wanted = [name for name in (names or "").split(",") if name]
    with app.database.read() as session:
        job = find(session, principal, job_id)
        series = curves(session, app.layout, job, wanted, points, clock, first_step, last_step)
    if format == "csv" or (format is None and "text/csv" in request.headers.get("accept", "")):
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("name", "step", "value"))
        writer.writerows((cell(name), step, value) for name, values in series.items() for step, value in values)
        return Response(text.getvalue(), media_type="text/csv; charset=utf-8")
    return JSONResponse(series)


@router.get(
    "/jobs/{job_id}/logs",
    summary="Log of a job",
    response_class=Response,
    responses={
        200: {
            "description": "What the trainer printed.",
            "content": {"text/plain": {"schema": {"type": "string"}, "example": "loading the model …\n"}},
            "headers": {
                "x-log-attempt": {"description": "Whose log it is; 0 before the first.", "schema": {"type": "integer"}},
                "x-log-offset": {"description": "Ask for this `offset` next.", "schema": {"type": "integer"}},
                "x-log-size": {"description": "Bytes of the whole log now.", "schema": {"type": "integer"}},
            },
        },
        **responses(404, 422),
    },
)
def job_logs(
    job_id: JobId,
    principal: Reading,
    app: App,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Default: the newest.")] = None,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only so many lines, the last ones.")] = None,
    offset: Annotated[int | None, Query(ge=0, le=2**62, description="From this byte on, to follow.")] = None,
) -> Response:
    """The trainer's output as text, at most 1 MiB per response: its end, or what follows `offset`.

    To follow a log, ask again with `attempt` and the `offset` from the headers `x-log-attempt` and `x-log-offset`.
    """
    if tail is not None and offset is not None:
        raise BadRequest("give `tail` or `offset`, not both", field="tail")
    with app.database.read() as session:
        newest = find(session, principal, job_id).attempt
    if attempt is not None and attempt > newest:
        raise NotFound(f"the job has had {newest} attempts", field="attempt")
    number = attempt or newest
    window = logs.LogWindow("", 0, 0)
    if number > 0:
        run = app.layout.attempt(job_id, number).relative_to(app.layout.root)
        window = logs.of_run(app.store, str(run), offset=offset, tail=tail)
    headers = {
        "x-log-attempt": str(number),
        "x-log-offset": str(window.offset),
        "x-log-size": str(window.size),
        "cache-control": "no-store",
    }
    return Response(window.text, media_type="text/plain; charset=utf-8", headers=headers)


@router.get(
    "/jobs/{job_id}/artifacts",
    summary="List a job's artifacts",
    response_model=schemas.ArtifactList,
    response_class=JSONResponse,
    responses=responses(404),
)
def list_artifacts(job_id: JobId, principal: Reading, app: App) -> Response:
    """Adapter or model, model card, plots and records, each with size, SHA-256 and URL."""
    with app.database.read() as session:
        find(session, principal, job_id)
        return JSONResponse({"data": [schemas.artifact_view(row) for row in queries.artifacts(session, job_id)]})


@router.head("/jobs/{job_id}/artifacts/{path:path}", include_in_schema=False)
@router.get(
    "/jobs/{job_id}/artifacts/{path:path}", summary="Download an artifact", response_class=Response, responses=DOWNLOAD
)
def get_artifact(
    request: Request,
    job_id: JobId,
    path: Annotated[str, Path(max_length=512, description="As listed.", examples=["adapter/adapter_config.json"])],
    principal: Reading,
    app: App,
) -> Response:
    """One file; `Range` resumes an interrupted download. The ETag is the file's SHA-256."""
    with app.database.read() as session:
        find(session, principal, job_id)
        missing = NotFound("the job has no such artifact; `GET /jobs/{id}/artifacts` lists them", field="path")
        if (row := queries.find_artifact(session, job_id, path)) is None:
            raise missing
    return artifact_reply(request, app, row, missing=missing)
