"""`/sweeps`: submit, list, look, cancel, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Principal, Reading, Writing
from api.deps import After, App, AppState, Limit
from api.handles import SweepId
from api.http.body import read_body
from api.http.errors import responses
from api.http.once import Asked, Once, answer, earlier
from api.jobs import plan
from api.jobs.service import JSON_TYPES, YAML_TYPES, decode
from api.sweeps import schemas
from api.sweeps.service import Sweeps, view
from core.jobs.lifecycle.sweeps import records, wishes

router = APIRouter(tags=["sweeps"])

_BODY = {
    "required": True,
    "description": "A job with `sweep`: fields of the job with the values that they take (docs/sweeps.md).",
    "content": {
        media_type: {"schema": {"type": "object", "required": ["sweep"]}, "example": schemas.EXAMPLE}
        for media_type in (*JSON_TYPES, *YAML_TYPES)
    },
}


@router.post(
    "/sweeps",
    status_code=201,
    summary="Submit a sweep",
    response_model=schemas.SweepView,
    response_class=JSONResponse,
    responses={
        200: {"model": schemas.SweepDryRun, "description": "With `dry_run=true`."},
        **responses(404, 410, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _BODY},
)
async def create_sweep(
    request: Request,
    principal: Writing,
    app: App,
    once: Asked,
    dry_run: Annotated[bool, Query(description="Check all runs and plan the first, store nothing.")] = False,
) -> Response:
    """Check all runs of a sweep and submit them, all or none. Each is an ordinary job in the queue.

    At most 200 runs. What is wrong with a run comes back with its number and its values.
    """
    body = await read_body(request, app.settings.max_body_bytes)
    content_type = request.headers.get("content-type", "")
    return await run_in_threadpool(_create, app, principal, once, body, content_type, dry_run)


def _create(app: AppState, principal: Principal, once: Once, body: bytes, content_type: str, dry_run: bool) -> Response:
    document, sweeps = decode(body, content_type), Sweeps(app.database, app.settings, app.layout)
    if dry_run:
        _, sweep, runs = sweeps.checked(principal, document, unsent=True)
        with app.database.read() as session:
            planned, words = plan.view(session, principal.project_id, runs[0][1], free=None)
        told = {"dry_run": True, "runs": len(runs), "sweep": sweep.model_dump(mode="json")}
        told |= {"points": [point for point, _ in runs], "first": runs[0][1].model_dump(mode="json")}
        return JSONResponse({**told, "plan": planned, "plan_reason": words})
    found = earlier(app, principal, once, document)
    if found is not None:
        return found
    name, sweep, runs = sweeps.checked(principal, document)

    def work(session: Any) -> dict[str, Any]:
        return sweeps.create(session, principal, name, sweep, runs)

    return answer(app, principal, once, document, work, status=201)


@router.get(
    "/sweeps",
    summary="List sweeps",
    response_model=schemas.SweepPage,
    response_class=JSONResponse,
    responses=responses(400, 422),
)
def list_sweeps(principal: Reading, app: App, limit: Limit = 20, after: After = None) -> Response:
    """The project's sweeps, newest first, in pages: repeat with `after` = `next` while `has_more`."""
    with app.database.read() as session:
        page = records.page(session, principal.project_id, after=after, limit=limit)
        data = [view(session, one) for one in page.items]
    following = page.items[-1].id if page.has_more else None
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.get(
    "/sweeps/{sweep_id}",
    summary="Show a sweep",
    response_model=schemas.SweepView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_sweep(sweep_id: SweepId, principal: Reading, app: App) -> Response:
    """Its runs with their values and results, and the best one."""
    with app.database.read() as session:
        return JSONResponse(view(session, records.find(session, principal, sweep_id)))


@router.delete(
    "/sweeps/{sweep_id}",
    summary="Delete a sweep",
    response_model=schemas.SweepDeleted,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def delete_sweep(sweep_id: SweepId, principal: Writing, app: App) -> Response:
    """Delete an ended sweep. Its jobs stay, with all they have made."""
    with app.database.write() as session:
        wishes.remove(session, principal, sweep_id)
    return JSONResponse({"id": sweep_id, "deleted": True})


@router.post(
    "/sweeps/{sweep_id}/cancel",
    summary="Cancel a sweep",
    response_model=schemas.SweepView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def cancel_sweep(sweep_id: SweepId, principal: Writing, app: App, once: Asked) -> Response:
    """Cancel all runs that have not ended. Idempotent."""

    def work(session: Any) -> dict[str, Any]:
        return view(session, wishes.cancel(session, principal, sweep_id))

    return answer(app, principal, once, None, work)
