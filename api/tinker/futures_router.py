"""`/api/v1`: the part of Tinker's protocol that waits for many samples at once."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import App
from api.http.body import read_body
from api.http.waiting import until
from api.sessions.wakes import FIRST_LOOK, LONGEST_LOOK
from api.tinker.door import CLONE, Door, SamplerId
from api.tinker.forms import bodies
from core.jobs.lifecycle.sessions import lanes, log, records

router = APIRouter(prefix="/api/v1", tags=["sessions"], include_in_schema=False)

HOLD_SECONDS = 25.0
"""Time for which a request is held before the client is to ask again."""
Ends = list[tuple[int, bool]]


@router.post("/retrieve_futures")
async def retrieve_futures(request: Request, principal: Reading, app: App) -> Response:
    """Which requests of a sampling session have ended since the cursor; each result has a request of its own."""
    wish = bodies.parsed(bodies.Polled, await read_body(request, app.settings.max_body_bytes))
    of, sampler = Door(app, principal), SamplerId.read(wish.target.sampling_session_id)
    seconds = HOLD_SECONDS if wish.timeout is None else min(wish.timeout, HOLD_SECONDS)
    found = await until(
        bool,
        lambda: _ended(of, sampler, wish),
        seconds,
        first=FIRST_LOOK,
        longest=LONGEST_LOOK,
        request=request,
        rung=lambda: app.wakes.of(sampler.host),
    )
    told = [{"state": "finished" if well else "failed", "request_id": f"{sampler.host}.{at}"} for at, well in found]
    return JSONResponse({"completions": told, "cursor": found[-1][0] if found else wish.prev_cursor})


def _ended(of: Door, sampler: SamplerId, wish: bodies.Polled) -> Ends:
    lane = sampler.lane(wish.target.cloned_sampler_id)
    with of.app.database.read() as session:
        found, told, others = lanes.ended(session, of.actor, sampler.host, lane, wish.prev_cursor)
    if others and found.status == "parked":  # it was being parked when a request came
        with of.app.database.write() as session:
            log.bring_back(session, records.find(session, of.actor, sampler.host, lock=True), of.actor)
    return told


@router.post("/join_sampling_session")
async def join_sampling_session(request: Request, principal: Writing, app: App) -> Response:
    """A number for one more client of a sampling session, which nobody has used there."""
    wish = bodies.parsed(bodies.Joined, await read_body(request, app.settings.max_body_bytes))
    counter = await run_in_threadpool(_number, Door(app, principal), SamplerId.read(wish.sampling_session_id))
    return JSONResponse({"client_counter": counter, "type": "join_sampling_session"})


def _number(of: Door, sampler: SamplerId) -> int:
    with of.app.database.read() as session:
        records.find(session, of.actor, sampler.host)
        while True:
            drawn = secrets.randbelow(CLONE) + 1
            if not lanes.is_used(session, sampler.host, sampler.lane(drawn)):
                return drawn


@router.post("/cancel_future")
async def cancel_future(request: Request, principal: Writing, app: App) -> Response:
    """Do not compute a sample that nobody waits for any more."""
    ticket = bodies.parsed(bodies.Ticket, await read_body(request, app.settings.max_body_bytes))
    await run_in_threadpool(_cancel, Door(app, principal), *ticket.place())
    return Response(status_code=204)


def _cancel(of: Door, host: str, position: int) -> None:
    with of.app.database.write() as session:
        lanes.cancel(session, of.actor, host, position)
