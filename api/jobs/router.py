"""`/jobs`: submit, list, look, change, measure, read, fetch, pause, resume, cancel, retry, delete."""

from __future__ import annotations

import csv
import io
import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import After, App, Limit
from api.errors import BadRequest, nearest, printable
from api.fields import QueryMoment, cell
from api.handles import JobId
from api.http.body import json_body, read_body, read_json, read_optional_json
from api.http.errors import responses
from api.http.once import Asked, answer, earlier
from api.jobs import logs, schemas
from api.jobs.artifact_reply import DOWNLOAD, artifact_reply
from api.jobs.removal import Deletions
from api.jobs.service import JSON_TYPES, YAML_TYPES, Jobs, Submission
from api.queue.schemas import place_view
from api.queue.settings import queue_settings
from core.errors import Fault, NotFound
from core.jobs.base.states import Status
from core.jobs.lifecycle import changes
from core.jobs.lifecycle.submit import cancel, find, pause, resume
from core.jobs.scheduling import cluster
from core.jobs.views import explain, queries
from core.jobs.views.curves import curves
from core.spec.job import TAG

router = APIRouter(tags=["jobs"])

_BODY = {
    "required": True,
    "description": "A job: only `model` and `data` must be there. Plain strings are short forms of their axis.",
    "content": {
        **{
            media_type: {
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "examples": {
                    "short": {"summary": "Short forms and defaults", "value": schemas.SPEC_SHORT},
                    "full": {"summary": "Every choice spelt out", "value": schemas.SPEC_LONG},
                },
            }
            for media_type in JSON_TYPES
        },
        **{
            media_type: {
                "schema": {"$ref": "#/components/schemas/JobSpec"},
                "examples": {"short": {"summary": "A job file", "value": schemas.SPEC_YAML}},
            }
            for media_type in YAML_TYPES
        },
    },
}


@router.post(
    "/jobs",
    status_code=201,
    summary="Submit a job",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses={
        200: {"model": schemas.DryRun, "description": "With `dry_run=true`."},
        **responses(404, 410, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _BODY},
)
async def create_job(
    request: Request,
    principal: Writing,
    app: App,
    dry_run: Annotated[bool, Query(description="Check, resolve and plan the job, store nothing.")] = False,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="A retry with the same key and the same body, compared as JSON values, makes no second job.",
            examples=["3f2c9a0e"],
        ),
    ] = None,
) -> Response:
    """Check a job and put it in the queue.

    The body is a job spec in JSON or YAML (docs/spec.md). What is wrong with it comes back as 422 with a fault for
    every wrong field. The reply shows the spec as it will run, with every default written out; with `dry_run` also the
    plan of its memory for each kind of slot here (docs/plans.md). A job that by that plan fits no node is refused.

    In a dry run, ids that begin with `file-0000000000000000000000` stand for files that are not uploaded yet: a job is
    checked before its data goes over the wire.
    """
    body = await read_body(request, app.settings.max_body_bytes)
    sent = Submission(body, request.headers.get("content-type", ""), request.url.path, idempotency_key)
    jobs = Jobs(app.database, app.settings, app.layout)
    answer = await run_in_threadpool(jobs.create, principal, sent, dry_run=dry_run)
    headers = {"idempotency-replayed": "true"} if answer.replayed else {}
    if answer.status == 201:
        headers["location"] = answer.body["links"]["self"]
    return JSONResponse(answer.body, answer.status, headers=headers)


def _statuses(words: list[str]) -> list[Status]:
    known = [status.value for status in Status]
    for word in words:
        if word not in known:
            message = f"unknown status `{printable(word)}`; {nearest(word, known)}"
            raise BadRequest(
                message, field="status", code="unknown_value", faults=(Fault("unknown_value", message, "status"),)
            )
    return [Status(word) for word in words]


def _tags(words: list[str]) -> list[str]:
    for word in words:
        if re.fullmatch(TAG, word) is None:
            message = f"`{printable(word)}` is not a tag: letters, digits and `._:/=+-`, at most 50 characters"
            raise BadRequest(message, field="tag", faults=(Fault("invalid_value", message, "tag"),))
    return words


@router.get(
    "/jobs",
    summary="List jobs",
    response_model=schemas.JobPage,
    response_class=JSONResponse,
    responses=responses(400, 422),
)
def list_jobs(
    principal: Reading,
    app: App,
    status: Annotated[list[str] | None, Query(description="Only these; may be given several times.")] = None,
    name: Annotated[str | None, Query(max_length=100, pattern=r"^[^\x00]*$", description="Only of this name.")] = None,
    tag: Annotated[
        list[str] | None, Query(max_length=20, description="Only with this tag; may be given several times: with all.")
    ] = None,
    archived: Annotated[bool, Query(description="Archived ones too.")] = False,
    created_after: Annotated[QueryMoment | None, Query(description="Only younger ones; ISO 8601.")] = None,
    limit: Limit = 20,
    after: After = None,
) -> Response:
    """The project's jobs without their specs, newest first, in pages: repeat with `after` = `next` while `has_more`."""
    since = None if created_after is None else created_after.timestamp()
    with app.database.read() as session:
        page = queries.jobs_page(
            session,
            principal.project_id,
            statuses=_statuses(status or []),
            name=name,
            created_after=since,
            tags=_tags(tag or []),
            archived=archived,
            after=after,
            limit=limit,
        )
        held = cluster.held(session, [job.id for job in page.items if job.node is not None])
        tries = queries.training_attempts(session, [job.id for job in page.items])
    data = [
        schemas.job_view(job, slots=held.get(job.id, []), training_attempts=tries.get(job.id, 0), listed=True)
        for job in page.items
    ]
    following = page.items[-1].id if page.has_more else None
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.get(
    "/jobs/{job_id}",
    summary="Show a job",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_job(job_id: JobId, principal: Reading, app: App) -> Response:
    """Status with its reason, progress, result or failure, and the position in the queue while it waits."""
    with app.database.read() as session:
        job = find(session, principal, job_id)
        told = explain.job(session, queue_settings(app), job)
        place = None if told is None else place_view(told)
        slots = cluster.held(session, [job.id]).get(job.id, [])
        tries = queries.training_attempts(session, [job.id]).get(job.id, 0)
        return JSONResponse(schemas.job_view(job, place, slots, training_attempts=tries))


@router.patch(
    "/jobs/{job_id}",
    summary="Change a job's priority, tags or note, or archive it",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.JobChange, {"tags": ["baseline"], "note": "best so far"}),
)
async def change_job(request: Request, job_id: JobId, principal: Writing, app: App) -> Response:
    """A waiting job with another priority gets its new position at once; running jobs continue. `spec` stays as
    submitted. An archived job is left out of lists, and nothing else changes for it."""
    wish = await read_json(request, schemas.JobChange, app.settings.max_body_bytes)

    def write() -> dict[str, Any]:
        with app.database.write() as session:
            labels = changes.Labels(wish.tags, wish.note, wish.archived)
            job = changes.label(session, principal, job_id, labels)
            if wish.priority is not None:
                job = changes.prioritise(session, principal, job_id, wish.priority)
            return schemas.job_view(job)

    return JSONResponse(await run_in_threadpool(write))


@router.delete(
    "/jobs/{job_id}",
    summary="Delete a job",
    response_model=schemas.JobDeleted,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def delete_job(
    job_id: JobId,
    principal: Writing,
    app: App,
    dry_run: Annotated[bool, Query(description="Only say what would go, and what stands against it.")] = False,
) -> Response:
    """Delete an ended job: its run folder with checkpoints, artifacts and logs, its model with all exports, and its
    events, metrics and spec.

    Its GPU time stays in `GET /usage`, uploaded files stay, and so do backups. Refused while the job has not ended,
    and while something needs it: a retry that has not succeeded, a running pipeline or sweep, a job that waits for it,
    a model over its weights. With `dry_run` these are `obstacles`. Asking twice is fine.
    """
    deletions = Deletions(app.database, app.settings, app.layout, app.store)
    goes = deletions.preview(principal, job_id) if dry_run else deletions.delete(principal, job_id)
    return JSONResponse(schemas.removal_view(goes, deleted=not dry_run))


@router.post(
    "/jobs/{job_id}/cancel",
    summary="Cancel a job",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def cancel_job(job_id: JobId, principal: Writing, app: App, once: Asked) -> Response:
    """Cancel a job permanently: at once while it waits, otherwise when its trainer has ended. Idempotent."""
    return answer(app, principal, once, None, lambda session: schemas.job_view(cancel(session, principal, job_id)))


@router.post(
    "/jobs/{job_id}/pause",
    summary="Pause a job",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def pause_job(job_id: JobId, principal: Writing, app: App, once: Asked) -> Response:
    """Release its slot after the trainer has written a checkpoint. Idempotent."""
    return answer(app, principal, once, None, lambda session: schemas.job_view(pause(session, principal, job_id)))


@router.post(
    "/jobs/{job_id}/resume",
    summary="Resume a paused job",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def resume_job(job_id: JobId, principal: Writing, app: App, once: Asked) -> Response:
    """Queue a paused job again. It continues from its checkpoint and ends with the weights of an undisturbed run."""
    return answer(app, principal, once, None, lambda session: schemas.job_view(resume(session, principal, job_id)))


@router.post(
    "/jobs/{job_id}/retry",
    summary="Retry a failed or cancelled job",
    response_model=schemas.JobView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410, 413, 415, 422),
    openapi_extra=json_body(schemas.JobRetry, {"resources": {"max_runtime_seconds": 7200}}, required=False),
)
async def retry_job(request: Request, job_id: JobId, principal: Writing, app: App, once: Asked) -> Response:
    """Create a job with the same spec that continues from the old job's newest checkpoint; `retry_of` names the old
    job. An optional body sets a new time limit.

    Asked again while that job has not failed too, it answers that job.
    """
    wish = await read_optional_json(request, schemas.JobRetry, app.settings.max_body_bytes)
    document = None if wish is None else wish.model_dump()
    limit = wish.resources.max_runtime_seconds if wish is not None and wish.resources is not None else None
    jobs = Jobs(app.database, app.settings, app.layout)

    def write() -> Response:
        found = earlier(app, principal, once, document)
        if found is not None:
            return found
        jobs.check_retry(principal, job_id)
        return answer(
            app,
            principal,
            once,
            document,
            lambda session: jobs.retry(session, principal, job_id, max_runtime_seconds=limit),
        )

    return await run_in_threadpool(write)


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
