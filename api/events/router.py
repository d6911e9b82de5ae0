"""`GET /jobs/{id}/events`: a stream of server-sent events, or a page of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import Receive, Scope, Send

from api.auth import service
from api.auth.policy import Principal, Reading
from api.deps import App, AppState
from api.errors import BadRequest
from api.events.hub import view
from api.handles import JobId
from api.http.errors import responses
from core.base.attribute_docs import AttributeDocsModel
from core.jobs.lifecycle.submit import Actor, find
from core.jobs.views import queries

router = APIRouter(tags=["jobs"])
log = logging.getLogger("eft.api.events")

LOOK_AGAIN_SECONDS = 30.0
"""How long a stream may outlive its key."""

_EVENT: dict[str, Any] = {
    "seq": 3,
    "type": "status",
    "time": "2026-11-21T09:20:57.120000Z",
    "attempt": 2,
    "data": {"from": "starting", "to": "running", "reason": "runs on box-1"},
}


class EventView(AttributeDocsModel):
    """One thing that happened to a job."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EVENT]})
    seq: int
    """Counts from 1 without gaps; the id of a server-sent event."""
    type: str
    """`status`, `phase`, `evaluation`, `samples`, `checkpoint`, `resumed`, `notice`, `run_record`, `result`, `error`;
    `priority` when somebody has changed it, `after` when a job that it waits for has ended, `preempts` and `preempted`
    when a job leaves its slot to another."""
    time: str
    """ISO 8601, UTC."""
    attempt: int
    data: dict[str, Any]
    """What a type carries: for `status` from, to and reason."""


class EventPage(AttributeDocsModel):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [_EVENT], "has_more": False, "next": 3}]},
    )
    data: list[EventView]
    has_more: bool
    next: int | None
    """Give it as `after` to go on; null when the page is empty."""


class EventStream(Response):
    """Sends what the hub tells and leaves it at once when the client does."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        headers = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sender = asyncio.create_task(self._send(send))
        leaver = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({sender, leaver}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, leaver):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for encoded in events:
                await send({"type": "http.response.body", "body": encoded, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@router.get(
    "/jobs/{job_id}/events",
    summary="Follow a job",
    response_class=Response,
    responses={
        200: {
            "model": EventPage,
            "description": "A stream, or with `format=json` a page.",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": 'id: 3\nevent: status\ndata: {"seq":3,"type":"status",…}\n\n'
                    'event: end\ndata: {"status":"succeeded"}\n\n',
                }
            },
        },
        **responses(404, 422),
    },
)
async def events(
    request: Request,
    job_id: JobId,
    principal: Reading,
    app: App,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Number of the last event you have.")] = None,
    format: Annotated[Literal["sse", "json"] | None, Query(description="`json`: a page instead of a stream.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Events of a page; a stream has no limit.")] = 200,
    last_event_id: Annotated[str | None, Header(description="As browsers send it when they connect again.")] = None,
) -> Response:
    """All past events of the job, followed by new ones, as server-sent events.

    `id` is the event's number, `event` its type, `data` the event as JSON. The stream starts behind `Last-Event-ID`
    (or `after`), ends with an event `end` once the job is final, and sends a comment every 15 seconds so that
    proxies keep it open. With `format=json` (or `Accept: application/json`) the reply is one page of events.
    """
    seen = last_seen(after, last_event_id)
    if format == "json" or (format is None and "application/json" in request.headers.get("accept", "")):
        return JSONResponse(await run_in_threadpool(_page, app, principal, job_id, seen, limit))
    await run_in_threadpool(_exists, app, principal, job_id)
    return EventStream(while_allowed(app, principal, app.hub.follow(job_id, seen)))


async def while_allowed(
    app: AppState, principal: Principal, events: AsyncGenerator[bytes], seconds: float = LOOK_AGAIN_SECONDS
) -> AsyncGenerator[bytes]:
    """The events, for as long as their reader may have them: a stream lasts for days, a key may not. Looked at every
    `seconds`, and with the next event or keep-alive after that. The client then connects again, and is told.
    """

    def may() -> bool:
        with app.database.read() as session:
            now = service.again(session, principal)
        return now is not None and now.role is not None

    looked = time.monotonic()
    async with contextlib.aclosing(events):
        async for encoded in events:
            if time.monotonic() - looked >= seconds:
                try:
                    if not await asyncio.to_thread(may):
                        return
                except SQLAlchemyError as error:
                    log.warning("the database does not say whether streams may go on; they do: %s", error)
                looked = time.monotonic()
            yield encoded


def last_seen(after: int | None, last_event_id: str | None) -> int:
    if last_event_id:
        if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) < 10):
            raise BadRequest("Last-Event-ID is the number of an event", field="last-event-id")
        return int(last_event_id)
    return after or 0


def _exists(app: App, principal: Actor, job_id: str) -> None:
    with app.database.read() as session:
        find(session, principal, job_id)


def _page(app: App, principal: Actor, job_id: str, after: int, limit: int) -> dict[str, Any]:
    with app.database.read() as session:
        job = find(session, principal, job_id)
        rows = queries.events_after(session, job_id, after, limit)
        last = rows[-1].seq if rows else None
        return {
            "data": [view(row) for row in rows],
            "has_more": last is not None and last < job.event_seq,
            "next": last,
        }
