"""`/queue`, `/usage`, `/limits`, `/gc`: the order and why each job waits, use and quotas, what is kept."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth.policy import Operating, ReadingOrOperating
from api.deps import App
from api.errors import BadRequest
from api.fields import QueryDay, cell
from api.http.body import json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, answer, earlier
from api.queue import schemas
from api.queue.settings import queue_settings
from core.jobs.lifecycle import retention
from core.jobs.policies import quotas, usage
from core.jobs.views import explain

router = APIRouter(tags=["queue"])
_EPOCH = date(1970, 1, 1)


@router.get(
    "/queue",
    summary="Show the queue",
    response_model=schemas.QueueView,
    response_class=JSONResponse,
    responses=responses(422),
)
def show_queue(
    principal: ReadingOrOperating,
    app: App,
    limit: Annotated[
        int, Query(ge=1, le=1000, description="Jobs that wait for training, and as many to prepare.")
    ] = 100,
) -> Response:
    """Waiting jobs in queue order, with position, reason and estimated start.

    Everybody sees every place of the line; whose job of another project stands there, only admins of the box see.
    """
    with app.database.read() as session:
        told = explain.queue(session, queue_settings(app), limit)
        more = explain.beyond(session, told, limit)
        ids = {one.job.owner_id for one in told} | {one.job.project_id for one in told}
        names = quotas.names(session, ids)
    data = [schemas.waiting_view(one, names, principal.project_id, principal.operates) for one in told]
    return JSONResponse({"data": data, "more": more})


@router.get(
    "/usage",
    summary="Report the usage",
    response_model=schemas.UsageList,
    response_class=Response,
    responses={
        200: {
            "description": "By owner and project.",
            "model": schemas.UsageList,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/UsageList"},
                },
                "text/csv": {
                    "schema": {"type": "string"},
                    "example": "owner,project,gpu_hours,cpu_hours\nada,voice,41.5,0\n",
                },
            },
        },
        **responses(400, 422),
    },
)
def report_usage(
    request: Request,
    principal: ReadingOrOperating,
    app: App,
    since: Annotated[QueryDay | None, Query(description="First day, UTC. Default: six days before the last.")] = None,
    until: Annotated[QueryDay | None, Query(description="Last day, UTC. Default: today.")] = None,
    format: Annotated[Literal["json", "csv"] | None, Query(description="Or by `Accept: text/csv`.")] = None,
) -> Response:
    """GPU hours, jobs and disk by owner and project: this project, or all for an admin of the box."""
    last = until or datetime.now(UTC).date()
    first = since or last - timedelta(days=6)
    if first > last:
        raise BadRequest("`since` is after `until`", field="since")
    with app.database.read() as session:
        only = None if principal.operates else principal.project_id
        half_life = app.settings.fairshare_half_life_hours * 3600.0
        rows = usage.report(session, (first - _EPOCH).days, (last - _EPOCH).days, only, half_life)
        names = quotas.names(session, {row.owner_id for row in rows} | {row.project_id for row in rows})
    data = [schemas.usage_view(row, names) for row in rows]
    if format == "csv" or (format is None and "text/csv" in request.headers.get("accept", "")):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(schemas.UsageView.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: cell(value) for name, value in row.items()} for row in data)
        return Response(text.getvalue(), media_type="text/csv; charset=utf-8")
    return JSONResponse({"since": first.isoformat(), "until": last.isoformat(), "data": data})


@router.get(
    "/limits",
    summary="List quotas and shares",
    response_model=schemas.LimitList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_limits(principal: ReadingOrOperating, app: App) -> Response:
    """Your own and your project's; all of them for an admin of the box."""
    with app.database.read() as session:
        rows = quotas.limits(session, None if principal.operates else principal)
        names = quotas.names(session, [row.subject_id for row in rows])
        return JSONResponse({"data": [schemas.limit_view(row, names) for row in rows]})


@router.post(
    "/limits",
    summary="Set quotas and shares",
    response_model=schemas.LimitView,
    response_class=JSONResponse,
    responses=responses(404, 413, 415, 422),
    openapi_extra=json_body(schemas.NewLimit, {"scope": "project", "name": "lab", "max_running": 2}),
)
async def set_limits(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """Set quotas and shares of a project or an owner: a named field is set, a null one is removed, the others stay.

    A quota refuses no job: it holds the job in the queue, with its reason. Those of previews and sessions refuse.
    """
    wish = await read_json(request, schemas.NewLimit, app.settings.max_body_bytes)
    values: dict[str, Any] = {name: getattr(wish, name) for name in quotas.FIELDS if name in wish.model_fields_set}

    def write(session: Session) -> dict[str, Any]:
        row = quotas.change(session, principal, wish.scope, wish.name, values)
        return schemas.limit_view(row, quotas.names(session, [row.subject_id]))

    document = wish.model_dump(mode="json", exclude_unset=True)
    return await run_in_threadpool(answer, app, principal, once, document, write)


@router.post(
    "/gc",
    summary="Collect garbage",
    response_model=schemas.Collected,
    response_class=JSONResponse,
    responses=responses(422),
)
def collect(
    principal: Operating,
    app: App,
    once: Asked,
    dry_run: Annotated[bool, Query(description="Only say what would go.")] = False,
) -> Response:
    """Delete checkpoints of jobs that ended long ago, old previews and unused files, by the settings EFT_KEEP_…_DAYS.
    Artifacts and data that an active job may need stay."""
    if (found_before := earlier(app, principal, once, None)) is not None:
        return found_before
    with app.database.read() as session:
        found = list(retention.find(session, app.layout, retention.RetentionRules.of(app.settings)))
    if not dry_run:
        retention.sweep(app.layout)
        found = [one for one in found if retention.remove(app.database, app.layout, principal, one)]
    data = [{"kind": one.kind, "id": one.id, "bytes": one.bytes, "why": one.why} for one in found]
    told = {"dry_run": dry_run, "bytes": sum(one.bytes for one in found), "data": data}
    return answer(app, principal, once, None, lambda _: told)
