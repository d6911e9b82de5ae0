"""`/pipelines`: submit, list, look, follow, cancel, retry, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Principal, Reading, Writing
from api.deps import After, App, AppState, Limit
from api.events.router import EventStream, last_seen, while_allowed
from api.handles import PipelineId
from api.http.body import json_body, read_body, read_json
from api.http.errors import responses
from api.http.once import Asked, Once, answer, earlier
from api.jobs.service import JSON_TYPES, YAML_TYPES, decode
from api.pipelines import schemas
from api.pipelines.service import Pipelines
from core.jobs.lifecycle.pipelines import records, wishes
from core.jobs.lifecycle.pipelines.records import PipelineStatus

router = APIRouter(tags=["pipelines"])

_BODY = {
    "required": True,
    "description": "Jobs in order; each starts from the model of the step before unless it names another.",
    "content": {
        media_type: {"schema": {"$ref": "#/components/schemas/PipelineSpec"}, "example": schemas.EXAMPLE}
        for media_type in (*JSON_TYPES, *YAML_TYPES)
    },
}


def _service(app: AppState) -> Pipelines:
    return Pipelines(app.database, app.settings, app.layout)


@router.post(
    "/pipelines",
    status_code=201,
    summary="Submit a pipeline",
    response_model=schemas.PipelineView,
    response_class=JSONResponse,
    responses={
        200: {"model": schemas.PipelineDryRun, "description": "With `dry_run=true`."},
        **responses(404, 410, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _BODY},
)
async def create_pipeline(
    request: Request,
    principal: Writing,
    app: App,
    once: Asked,
    dry_run: Annotated[bool, Query(description="Check and resolve all jobs, store nothing.")] = False,
) -> Response:
    """Check all jobs of a pipeline and submit the first.

    The service submits each further one when the one before has succeeded and has passed its gates (docs/pipelines.md).
    What is wrong with a job comes back now, with a field such as `steps.1.job.method.r`.
    """
    body = await read_body(request, app.settings.max_body_bytes)
    content_type = request.headers.get("content-type", "")
    return await run_in_threadpool(_create, app, principal, once, body, content_type, dry_run)


def _create(app: AppState, principal: Principal, once: Once, body: bytes, content_type: str, dry_run: bool) -> Response:
    document, pipelines = decode(body, content_type), _service(app)
    if dry_run:
        _, steps = pipelines.checked(principal, document, unsent=True)
        shown = [{"name": step.name, "gates": step.gates, "job": step.spec} for step in steps]
        return JSONResponse({"dry_run": True, "steps": shown})
    found = earlier(app, principal, once, document)
    if found is not None:
        return found
    spec, steps = pipelines.checked(principal, document)
    return answer(
        app, principal, once, document, lambda session: pipelines.create(session, principal, spec, steps), status=201
    )


@router.get(
    "/pipelines",
    summary="List pipelines",
    response_model=schemas.PipelinePage,
    response_class=JSONResponse,
    responses=responses(400, 422),
)
def list_pipelines(
    principal: Reading,
    app: App,
    status: Annotated[PipelineStatus | None, Query(description="Only these.")] = None,
    limit: Limit = 20,
    after: After = None,
) -> Response:
    """The project's pipelines, newest first, in pages: repeat with `after` = `next` while `has_more`."""
    with app.database.read() as session:
        page = records.page(session, principal.project_id, status=status, after=after, limit=limit)
        steps = records.steps_of(session, [one.id for one in page.items])
        jobs = records.jobs_of(session, [step for each in steps.values() for step in each])
        data = [schemas.pipeline_view(one, steps[one.id], jobs) for one in page.items]
    following = page.items[-1].id if page.has_more else None
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.get(
    "/pipelines/{pipeline_id}",
    summary="Show a pipeline",
    response_model=schemas.PipelineView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_pipeline(pipeline_id: PipelineId, principal: Reading, app: App) -> Response:
    """Its status with the reason, and each step with its job and its gates."""
    with app.database.read() as session:
        return JSONResponse(_service(app).view(session, records.find(session, principal, pipeline_id)))


@router.delete(
    "/pipelines/{pipeline_id}",
    summary="Delete a pipeline",
    response_model=schemas.PipelineDeleted,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def delete_pipeline(pipeline_id: PipelineId, principal: Writing, app: App) -> Response:
    """Delete an ended pipeline with its events. Its jobs stay, with all they have made."""
    with app.database.write() as session:
        wishes.remove(session, principal, pipeline_id)
    return JSONResponse({"id": pipeline_id, "deleted": True})


@router.post(
    "/pipelines/{pipeline_id}/cancel",
    summary="Cancel a pipeline",
    response_model=schemas.PipelineView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def cancel_pipeline(pipeline_id: PipelineId, principal: Writing, app: App, once: Asked) -> Response:
    """Submit no further step and cancel the job that is under way. Idempotent."""

    def work(session: Any) -> dict[str, Any]:
        return _service(app).view(session, wishes.cancel(session, principal, pipeline_id))

    return answer(app, principal, once, None, work)


@router.post(
    "/pipelines/{pipeline_id}/retry",
    status_code=201,
    summary="Retry a failed or cancelled pipeline",
    response_model=schemas.PipelineView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410, 413, 415, 422),
    openapi_extra=json_body(schemas.PipelineRetryWish, {"from": "intents"}),
)
async def retry_pipeline(
    request: Request, pipeline_id: PipelineId, principal: Writing, app: App, once: Asked
) -> Response:
    """Create a pipeline that takes over the jobs of the old one up to a step; `retry_of` names the old one.

    Without `from` it begins at the step at which the old one ended, and a failed job goes on from its newest
    checkpoint. A step that is named begins anew; the gates before it count as passed. Asked again while that pipeline
    has not failed too, it answers that pipeline.
    """
    wish = await read_json(request, schemas.PipelineRetryWish, app.settings.max_body_bytes)

    def work() -> Response:
        return answer(
            app,
            principal,
            once,
            wish.model_dump(mode="json", by_alias=True),
            lambda session: _service(app).retry(session, principal, pipeline_id, wish.start),
            status=201,
        )

    return await run_in_threadpool(work)


@router.get(
    "/pipelines/{pipeline_id}/events",
    summary="Follow a pipeline",
    response_class=Response,
    responses={
        200: {
            "model": schemas.PipelineEventPage,
            "description": "A stream, or with `format=json` a page.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": 'id: 2\nevent: step\ndata: {"seq":2,"type":"step",…}\n\n'
                    'event: end\ndata: {"status":"succeeded"}\n\n',
                }
            },
        },
        **responses(404, 422),
    },
)
async def pipeline_events(
    request: Request,
    pipeline_id: PipelineId,
    principal: Reading,
    app: App,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Number of the last event you have.")] = None,
    format: Annotated[str | None, Query(pattern="^(sse|json)$", description="`json`: a page.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Events of a page; a stream has no limit.")] = 200,
    last_event_id: Annotated[str | None, Header(description="As browsers send it when they connect again.")] = None,
) -> Response:
    """All past events of the pipeline, followed by new ones, as `GET /jobs/{id}/events` has them of a job."""
    seen = last_seen(after, last_event_id)
    if format == "json" or (format is None and "application/json" in request.headers.get("accept", "")):
        return JSONResponse(await run_in_threadpool(_page, app, principal, pipeline_id, seen, limit))
    await run_in_threadpool(_exists, app, principal, pipeline_id)
    return EventStream(while_allowed(app, principal, app.hub.follow(pipeline_id, seen)))


def _exists(app: AppState, principal: Principal, pipeline_id: str) -> None:
    with app.database.read() as session:
        records.find(session, principal, pipeline_id)


def _page(app: AppState, principal: Principal, pipeline_id: str, after: int, limit: int) -> dict[str, Any]:
    with app.database.read() as session:
        pipeline = records.find(session, principal, pipeline_id)
        rows = records.events_after(session, pipeline_id, after, limit)
        last = rows[-1].seq if rows else None
        more = last is not None and last < pipeline.event_seq
        return {"data": [schemas.event_view(row) for row in rows], "has_more": more, "next": last}
