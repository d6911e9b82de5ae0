"""`/jobs`: submit, list, look, change, pause, resume, cancel, retry, delete."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import After, App, Limit
from api.errors import BadRequest, nearest, printable
from api.fields import QueryMoment
from api.handles import JobId
from api.http.body import json_body, read_body, read_json, read_optional_json
from api.http.errors import responses
from api.http.once import Asked, answer, earlier
from api.jobs import schemas
from api.jobs.removal import Deletions
from api.jobs.service import JSON_TYPES, YAML_TYPES, Jobs, Submission
from api.queue.schemas import place_view
from api.queue.settings import queue_settings
from core.errors import Fault
from core.jobs.base.states import Status
from core.jobs.lifecycle import changes
from core.jobs.lifecycle.submit import cancel, find, pause, resume
from core.jobs.scheduling import cluster
from core.jobs.views import explain, queries
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
