"""`/gpus`, `/holds`, `/maintenance`: people and eft on the same GPUs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth.policy import Operating, Principal, ReadingOrOperating, Writing
from api.deps import App, AppState
from api.http.body import json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, Once, answer
from api.queue import gpu_schemas as schemas
from api.view import iso
from core.db.engine import read_now
from core.jobs.kinds import Kind
from core.jobs.policies import holds, maintenance
from core.jobs.scheduling import cluster

router = APIRouter(tags=["queue"])


@router.get(
    "/gpus",
    summary="List GPUs",
    response_model=schemas.GpuList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_gpus(principal: ReadingOrOperating, app: App) -> Response:
    """Every training slot with its hardware and its user, if it is not free: a job, a hold, or a process outside eft
    (with pid and user)."""
    with app.database.read() as session:
        seats = cluster.slot_states(session, read_now(session), app.settings.lease_seconds)
    data = [schemas.gpu_view(seat, principal.project_id) for seat in seats if seat.slot.phase == Kind.TRAIN]
    return JSONResponse({"data": data})


@router.get(
    "/gpus/history",
    summary="History of a GPU",
    response_model=schemas.SpanList,
    response_class=JSONResponse,
    responses=responses(404, 409, 422),
)
def gpu_history(
    principal: ReadingOrOperating,
    app: App,
    gpu: Annotated[str, Query(max_length=400, pattern=r"^[^\x00]+$", description="NODE/INDEX: see `GET /gpus`.")],
    limit: Annotated[int, Query(ge=1, le=1000, description="Spans.")] = 100,
) -> Response:
    """Past jobs and holds, newest first."""
    with app.database.read() as session:
        one = holds.place(session, gpu, "gpu")
        spans = cluster.history(session, one.node, one.slot, limit)
    data = []
    for span in spans:
        shown = span.what != "job" or span.project_id == principal.project_id
        data.append(
            {
                "what": span.what,
                "job": span.job_id if shown else None,
                "by": span.user if shown or principal.operates else None,
                "why": span.why,
                "since": iso(span.began),
                "until": iso(span.ended),
            }
        )
    return JSONResponse({"data": data})


@router.get(
    "/holds",
    summary="List held GPUs",
    response_model=schemas.HoldList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_holds(principal: ReadingOrOperating, app: App) -> Response:
    """GPUs that are held or drained now, with user, end and reason."""
    with app.database.read() as session:
        return JSONResponse({"data": _shown(session, holds.active(session, read_now(session)))})


@router.post(
    "/holds",
    status_code=201,
    summary="Hold GPUs",
    response_model=schemas.HoldList,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(
        schemas.NewHold,
        {"gpus": ["box/cpu"], "until": None, "for": "bob", "why": "notebook", "now": False},
    ),
)
async def hold_gpus(request: Request, principal: Writing, app: App, once: Asked) -> Response:
    """Hold GPUs for a user: nothing is claimed on them until the end of the hold. All of them are held, or none.

    On a busy GPU it counts from the end of its job on; with `now` the job writes a checkpoint and goes on elsewhere.
    Only an admin of the box may hold GPUs without an end. A hold of anybody else lasts at most EFT_HOLD_HOURS, on at
    most EFT_HOLD_SLOTS GPUs at once.
    """
    wish = await read_json(request, schemas.NewHold, app.settings.max_body_bytes)
    until = None if wish.until is None else wish.until.timestamp()
    return await _held(app, principal, once, wish, "hold", wish.held_for, until, wish.now)


@router.post(
    "/gpus/drain",
    summary="Drain GPUs",
    response_model=schemas.HoldList,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.NewDrain, {"gpus": ["box/cpu"], "why": "a new fan"}),
)
async def drain_gpus(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """Take GPUs out of service as `POST /nodes/{name}/drain` does for nodes: their jobs write a checkpoint and
    continue elsewhere; nothing is claimed there until `POST /gpus/undrain`, also across restarts."""
    wish = await read_json(request, schemas.NewDrain, app.settings.max_body_bytes)
    return await _held(app, principal, once, wish, "drain", "", None, True)


@router.post(
    "/holds/release",
    summary="Release GPUs",
    response_model=schemas.HoldList,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.Release, {"gpus": ["box/cpu"]}),
)
async def release_gpus(request: Request, principal: Writing, app: App, once: Asked) -> Response:
    """End a hold: allowed for its creator and for an admin of the box."""
    return await _released(request, principal, app, once)


@router.post(
    "/gpus/undrain",
    summary="Put GPUs back into service",
    response_model=schemas.HoldList,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.Release, {"gpus": ["box/cpu"]}),
)
async def undrain_gpus(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """End drains and holds of GPUs, whoever set them."""
    return await _released(request, principal, app, once)


async def _released(request: Request, principal: Principal, app: AppState, once: Once) -> Response:
    wish = await read_json(request, schemas.Release, app.settings.max_body_bytes)

    def write(session: Session) -> dict[str, Any]:
        done = holds.release(session, principal, wish.gpus, anybodys=principal.operates)
        return {"data": _shown(session, done)}

    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(mode="json"), write)


async def _held(
    app: AppState,
    principal: Principal,
    once: Once,
    wish: schemas.NewHold | schemas.NewDrain,
    kind: Literal["hold", "drain"],
    held_for: str,
    until: float | None,
    now: bool,
) -> Response:
    bounds = holds.HoldLimits(app.settings.hold_hours * 3600.0, app.settings.hold_slots)

    def write(session: Session) -> dict[str, Any]:
        made = holds.hold(
            session,
            principal,
            wish.gpus,
            held_for=held_for,
            why=wish.why,
            until=until,
            kind=kind,
            now=now,
            others_jobs=principal.operates,
            bounds=None if principal.operates else bounds,
        )
        return {"data": _shown(session, made)}

    status = 201 if kind == "hold" else 200
    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(mode="json"), write, status=status)


def _shown(session: Session, held: list[holds.NamedHold]) -> list[dict[str, Any]]:
    labels = {(one.node, one.slot): one.label for one in holds.places(session)}
    return [schemas.hold_view(one, labels) for one in held]


# -- maintenance


@router.get(
    "/maintenance",
    summary="List maintenance",
    response_model=schemas.MaintenanceList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_maintenance(principal: ReadingOrOperating, app: App) -> Response:
    """Planned and current maintenance."""
    with app.database.read() as session:
        return JSONResponse(
            {"data": [schemas.maintenance_view(row) for row in maintenance.planned(session, read_now(session))]}
        )


@router.post(
    "/maintenance",
    status_code=201,
    summary="Plan maintenance",
    response_model=schemas.MaintenanceView,
    response_class=JSONResponse,
    responses=responses(404, 413, 415, 422),
    openapi_extra=json_body(
        schemas.NewMaintenance,
        {"node": "box", "from": "2099-12-30T08:00:00+01:00", "until": "2099-12-30T10:00:00+01:00", "why": "new fans"},
    ),
)
async def plan_maintenance(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """Plan a window in which nothing runs on a node: jobs whose time limit extends into it do not start there. Jobs
    still running when it begins write a checkpoint and continue elsewhere, or there afterwards."""
    wish = await read_json(request, schemas.NewMaintenance, app.settings.max_body_bytes)

    def write(session: Session) -> dict[str, Any]:
        times = wish.starts_at.timestamp(), wish.until.timestamp()
        return schemas.maintenance_view(maintenance.plan(session, principal, wish.node, *times, wish.why))

    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(mode="json"), write, status=201)


@router.post(
    "/maintenance/cancel",
    summary="Cancel maintenance",
    response_model=schemas.MaintenanceView,
    response_class=JSONResponse,
    responses=responses(404, 413, 415, 422),
    openapi_extra=json_body(schemas.CancelMaintenance, {"id": "maint-01kar3v8x5m2h6n9qst4wyz0bc"}),
)
async def cancel_maintenance(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """Cancel a planned window, or end the current one. Idempotent."""
    wish = await read_json(request, schemas.CancelMaintenance, app.settings.max_body_bytes)

    def write(session: Session) -> dict[str, Any]:
        return schemas.maintenance_view(maintenance.cancel(session, principal, wish.id))

    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(mode="json"), write)
