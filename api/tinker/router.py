"""`/api/v1`: Tinker's protocol, without sampling (docs/tinker.md). Its routes are that protocol's, not ours: they are
not in the OpenAPI document."""

from __future__ import annotations

import re
import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading, Writing
from api.deps import App, AppState
from api.http.body import read_body
from api.sessions.results import result
from api.tinker import bases, door, results, runs
from api.tinker.door import Door
from api.tinker.forms import bodies, plain
from api.tinker.forms.messages import read_pass

router = APIRouter(prefix="/api/v1", tags=["sessions"], include_in_schema=False)

HOLD_SECONDS = 25.0
"""Time for which a request for a result is held before the client is to ask again."""
CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
}
"""Chunks come in their order: operations are computed in the order in which they come. The last three have SDKs speak
the newest form of the protocol that they know."""
SAMPLING = {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True}
"""For SDKs since SAMPLING_SINCE: one request waits for all samples of a client, not one for each."""
CANCELS = {"sample_cancel_enabled": True}
SAMPLING_SINCE = (0, 38)


@router.post("/client/config")
async def client_config(request: Request, principal: Reading, app: App) -> Response:
    """How the SDK is to behave."""
    return JSONResponse(CONFIG | (SAMPLING if await _is_new(request, app) else {}))


@router.post("/client/dynamic_config")
async def dynamic_config(request: Request, principal: Reading, app: App) -> Response:
    """What of it may change while the SDK runs."""
    return JSONResponse(CANCELS if await _is_new(request, app) else {})


async def _is_new(request: Request, app: AppState) -> bool:
    body = await read_body(request, app.settings.max_body_bytes)
    told = bodies.parsed(bodies.AskedConfig, body).sdk_version if body else ""
    return tuple(int(one) for one in re.findall(r"\d{1,9}", told)[:2]) >= SAMPLING_SINCE


@router.get("/healthz")
async def tinker_health(principal: Reading) -> Response:
    """For clients that ask before they begin."""
    return JSONResponse({"status": "ok"})


@router.post("/telemetry")
async def telemetry(request: Request, principal: Reading, app: App) -> Response:
    """Accepted and dropped: it has tracebacks of the caller's program."""
    await read_body(request, app.settings.max_body_bytes)
    return JSONResponse({"status": "accepted"})


@router.post("/create_session")
async def create_tinker_session(principal: Writing) -> Response:
    """A name for the models that follow; nothing is queued before the first of them."""
    return JSONResponse({"session_id": secrets.token_hex(16), "type": "create_session"})


@router.post("/session_heartbeat")
async def heartbeat(request: Request, principal: Writing, app: App) -> Response:
    """The program lives: its sessions are parked by their own clock, but not closed as unused."""
    wish = bodies.parsed(bodies.OfSession, await read_body(request, app.settings.max_body_bytes))
    await run_in_threadpool(Door(app, principal).heard, wish.session_id)
    return JSONResponse({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
def finish(session_id: str, principal: Writing, app: App) -> Response:
    """Close the client's sessions. What they saved stays."""
    Door(app, principal).finish(session_id)
    return Response(status_code=204)


@router.get("/get_server_capabilities")
def capabilities(principal: Reading, app: App) -> Response:
    """Models below EFT_MODEL_ROOTS; any other one that a session takes may be named, too."""
    return JSONResponse({"supported_models": [{"model_name": name} for name in bases.known(app.settings.model_roots)]})


@router.post("/create_model")
async def create_model(request: Request, principal: Writing, app: App) -> Response:
    """Open a session with one adapter."""
    wish = bodies.parsed(bodies.NewRun, await read_body(request, app.settings.max_body_bytes))
    return _ticket(await run_in_threadpool(Door(app, principal).create, wish))


@router.post("/get_info")
async def get_info(request: Request, principal: Reading, app: App) -> Response:
    """What a model is."""
    wish = bodies.parsed(bodies.OfRun, await read_body(request, app.settings.max_body_bytes))
    return JSONResponse(await run_in_threadpool(_info, Door(app, principal), wish.model_id))


def _info(of: Door, model_id: str) -> dict[str, Any]:
    found = of.run(model_id)
    rank = runs.rank(of, found)
    name = door.base_model(found)
    return {
        "type": "get_info",
        "model_id": model_id,
        "model_data": {"model_name": name, "tokenizer_id": name},
        "model_name": name,
        "is_lora": True,
        "lora_rank": rank,
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, principal: Writing, app: App) -> Response:
    """A forward pass; its message says whether with gradients. One in JSON, of an older SDK, has them."""
    sent = await read_body(request, app.settings.max_operation_bytes)
    read = read_pass if results.PROTOBUF in request.headers.get("content-type", "") else partial(plain.read_pass, False)
    asked = await run_in_threadpool(read, sent)
    return _ticket(await run_in_threadpool(Door(app, principal).passed, asked))


@router.post("/forward")
async def forward(request: Request, principal: Writing, app: App) -> Response:
    """A forward pass without gradients, of an older SDK."""
    sent = await read_body(request, app.settings.max_operation_bytes)
    asked = await run_in_threadpool(plain.read_pass, True, sent)
    return _ticket(await run_in_threadpool(Door(app, principal).passed, asked))


@router.post("/optim_step")
async def optim_step(request: Request, principal: Writing, app: App) -> Response:
    """Update the weights."""
    wish = bodies.parsed(bodies.StepWish, await read_body(request, app.settings.max_body_bytes))
    return _ticket(await run_in_threadpool(Door(app, principal).step, wish))


@router.post("/save_weights")
async def save_weights(request: Request, principal: Writing, app: App) -> Response:
    """Save adapter and optimizer."""
    wish = bodies.parsed(bodies.SaveWish, await read_body(request, app.settings.max_body_bytes))
    return _ticket(await run_in_threadpool(Door(app, principal).save, wish, "weights"))


@router.post("/load_weights")
async def load_weights(request: Request, principal: Writing, app: App) -> Response:
    """Load them into a new model, or into one that is there."""
    wish = bodies.parsed(bodies.LoadWish, await read_body(request, app.settings.max_body_bytes))
    return _ticket(await run_in_threadpool(Door(app, principal).load, wish))


@router.post("/retrieve_future")
async def retrieve_future(request: Request, principal: Reading, app: App) -> Response:
    """The result of a request, once it is there."""
    ticket = bodies.parsed(bodies.Ticket, await read_body(request, app.settings.max_body_bytes))
    of = Door(app, principal)
    seen = await result(of.sessions, request, principal, *ticket.place(), HOLD_SECONDS)
    packed = results.PROTOBUF in request.headers.get("accept", "")
    return await run_in_threadpool(results.reply, of, *seen, packed=packed)


def _ticket(request_id: str) -> Response:
    return JSONResponse({"request_id": request_id})
