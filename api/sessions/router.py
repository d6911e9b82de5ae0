"""`/sessions`: training loops that run elsewhere (docs/sessions.md)."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Principal, Reading, Writing
from api.deps import After, App, AppState, Limit
from api.handles import SessionId
from api.http.body import json_body, read_body
from api.http.errors import responses
from api.http.once import Asked, answer, earlier
from api.jobs.service import decode
from api.sessions import schemas
from api.sessions.results import result
from api.sessions.service import Sessions, read_operation, read_tensors
from core.db.tables import SessionOperation
from core.jobs.lifecycle.sessions import idle, records
from core.jobs.lifecycle.sessions.records import FoundSession
from core.spec.load import load_json, storable
from core.spec.session import tensors
from core.spec.session.job import SessionSpec

router = APIRouter(tags=["sessions"])

_OPERATION = {
    "required": True,
    "description": f"JSON, or `{tensors.MEDIA_TYPE}` with `seq` and `operation` in the metadata.",
    "content": {
        "application/json": {
            "schema": schemas.OPERATION_BODY,
            "example": {"seq": 1, "operation": {"op": "create", "model": "a", "method": {"type": "lora", "r": 8}}},
        },
        tensors.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}, "example": "…"},
    },
}


Position = Annotated[int, Path(ge=1, le=2**31 - 1, description="Place of an operation in the log.", examples=[2])]
Statuses = Annotated[
    list[str] | None, Query(description=f"Only sessions in this state, repeatable: {', '.join(records.STATUSES)}.")
]
Mine = Annotated[bool, Query(description="Only sessions that the caller has opened.")]
Wait = Annotated[float, Query(ge=0, le=60, description="Seconds to wait for the result before answering.")]


@router.post(
    "/sessions",
    status_code=201,
    summary="Open a session",
    response_model=schemas.SessionView,
    response_class=JSONResponse,
    responses=responses(404, 413, 415, 422, 507),
    openapi_extra=json_body(SessionSpec, schemas.EXAMPLE),
)
async def open_session(request: Request, principal: Writing, app: App, once: Asked) -> Response:
    """Queue a session: a base model that stays resident, and adapters that operations create and train. It waits its
    turn for a slot as a job does."""
    body = await read_body(request, app.settings.max_body_bytes)
    content_type = request.headers.get("content-type", "")

    def write() -> Response:
        document = decode(body, content_type)
        if (known := earlier(app, principal, once, document)) is not None:
            return known
        sessions = _sessions(app)
        spec, job = sessions.checked(principal, document)
        return answer(
            app, principal, once, document, lambda session: sessions.create(session, principal, spec, job), status=201
        )

    return await run_in_threadpool(write)


@router.get(
    "/sessions",
    summary="List sessions",
    response_model=schemas.SessionPage,
    response_class=JSONResponse,
    responses=responses(400, 422),
)
def list_sessions(
    principal: Reading, app: App, status: Statuses = None, mine: Mine = False, limit: Limit = 20, after: After = None
) -> Response:
    """The project's sessions, newest first, in pages: repeat with `after` = `next` while `has_more`."""
    statuses = records.statuses(status or [])
    with app.database.read() as session:
        page = records.page(session, principal, statuses=statuses, mine=mine, after=after, limit=limit)
        data = [schemas.session_view(one) for one in page.items]
    following = data[-1]["id"] if page.has_more else None
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.get(
    "/sessions/{session_id}",
    summary="Show a session",
    response_model=schemas.SessionView,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def show_session(session_id: SessionId, principal: Reading, app: App) -> Response:
    """Its state, and why it waits where it does."""
    with app.database.read() as session:
        return JSONResponse(schemas.session_view(records.find(session, principal, session_id)))


@router.post(
    "/sessions/{session_id}/park",
    summary="Park a session",
    response_model=schemas.SessionView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def park_session(session_id: SessionId, principal: Writing, app: App, once: Asked) -> Response:
    """Free its slot now; the next operation brings it back. Refused while an operation waits for its result.
    Idempotent."""
    return answer(
        app,
        principal,
        once,
        None,
        lambda session: schemas.session_view(idle.park(session, principal, session_id)),
    )


@router.post(
    "/sessions/{session_id}/close",
    summary="Close a session",
    response_model=schemas.SessionView,
    response_class=JSONResponse,
    responses=responses(404, 409, 410),
)
def close_session(session_id: SessionId, principal: Writing, app: App, once: Asked) -> Response:
    """End it and free its slot. What it has saved stays. Idempotent."""
    return answer(
        app,
        principal,
        once,
        None,
        lambda session: schemas.session_view(records.close(session, principal, session_id)),
    )


@router.post(
    "/sessions/{session_id}/operations",
    status_code=202,
    summary="Send an operation",
    response_model=schemas.OperationView,
    response_class=JSONResponse,
    responses={
        200: {"model": schemas.OperationView, "description": "It is done (`wait`)."},
        **responses(404, 409, 413, 415, 422, 507),
    },
    openapi_extra={"requestBody": _OPERATION},
)
async def send_operation(
    request: Request, session_id: SessionId, principal: Writing, app: App, wait: Wait = 0.0
) -> Response:
    """Accept an operation on an adapter; it is computed exactly once, behind all that were accepted before. The same
    `seq` of the same model again is the same operation; with other content it is a conflict. A parked session comes
    back."""
    body = await read_body(request, app.settings.max_operation_bytes)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def accept() -> tuple[FoundSession, SessionOperation]:
        packed = content_type == tensors.MEDIA_TYPE
        sent = read_tensors(body) if packed else read_operation(storable(load_json(body)))
        return _sessions(app).accept(principal, session_id, sent)

    found, row = await run_in_threadpool(accept)
    if wait == 0 and row.done_at is None:
        return _told(request, schemas.operation_view(found, row), b"", waiting=202)
    return await _answer(request, app, principal, session_id, row.position, wait, waiting=202)


@router.get(
    "/sessions/{session_id}/operations/{position}",
    summary="Get an operation's result",
    response_model=schemas.OperationView,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
async def get_operation(
    request: Request, session_id: SessionId, position: Position, principal: Reading, app: App, wait: Wait = 0.0
) -> Response:
    """Its result, or what it waits for. With `Accept: application/vnd.safetensors` the arrays come in that form, and
    all else in `operation` of the metadata."""
    return await _answer(request, app, principal, session_id, position, wait)


async def _answer(
    request: Request,
    app: AppState,
    principal: Principal,
    session_id: str,
    position: int,
    wait: float,
    *,
    waiting: int = 200,
) -> Response:
    found, row, body = await result(_sessions(app), request, principal, session_id, position, wait)
    return _told(request, schemas.operation_view(found, row), body, waiting=waiting)


def _told(request: Request, view: dict[str, Any], body: bytes, *, waiting: int) -> Response:
    status = waiting if view["status"] == "waiting" else 200
    if tensors.MEDIA_TYPE in request.headers.get("accept", ""):
        header, data = tensors.split(body) if body else ({}, b"")
        header["__metadata__"] = {"operation": json.dumps(view)}
        return Response(tensors.join(header, data), status, media_type=tensors.MEDIA_TYPE)
    return JSONResponse(view | {"arrays": tensors.unpack(body) if body else {}}, status)


def _sessions(app: AppState) -> Sessions:
    return Sessions(app.database, app.settings, app.layout)
