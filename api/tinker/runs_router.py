"""`/api/v1`: the part of Tinker's protocol that lists what was trained and saved."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.permit import lacks
from api.auth.policy import Policy, Reading, Role, Scope, Writing
from api.deps import App, address_of, identify
from api.http.body import read_body
from api.tinker import runs
from api.tinker.door import Door
from api.tinker.forms import bodies
from core.errors import Forbidden, SpecError

router = APIRouter(prefix="/api/v1", tags=["sessions"], include_in_schema=False)

Offset = Annotated[int, Query(ge=0, lt=2**31)]
Count = Annotated[int, Query(ge=1, le=1000)]
Kind = Literal["weights", "sampler_weights", "external_weights"]
_READS = Policy(Scope.READ, Role.VIEWER)


@router.post("/weights_info")
async def weights_info(request: Request, principal: Reading, app: App) -> Response:
    """What saved weights are of."""
    wish = bodies.parsed(bodies.SavedPath, await read_body(request, app.settings.max_body_bytes))
    return JSONResponse(await run_in_threadpool(runs.weights_info, Door(app, principal), wish.tinker_path))


@router.post("/copy_weights")
async def copy_weights(request: Request, principal: Writing, app: App) -> Response:
    """Copy saved weights into the project of the key; with a key of another project as access token, from there."""
    wish = bodies.parsed(bodies.CopyWish, await read_body(request, app.settings.max_body_bytes))
    if wish.destination_project_id not in (None, principal.project_id, principal.project_name):
        words = (
            f"a copy is made in the project of the key, `{principal.project_name}`: use a key of the destination, and "
            "give one of the source as `weights_access_token`"
        )
        raise SpecError(words, field="destination_project_id", code="invalid_value")
    token = request.headers.get("x-tinker-weights-access-token") or wish.weights_access_token
    once = request.headers.get("x-idempotency-key", "")

    def copy() -> str:
        source = Door(app, principal)
        if token is not None:
            other = identify(app, token.removeprefix("tml-"), address_of(request))
            if lacks(other, _READS) is not None:
                words = "the access token is a key that may not read its project"
                raise Forbidden(words, field="weights_access_token")
            source = Door(app, other)
        return runs.copy(Door(app, principal), source, wish, once)

    return JSONResponse({"tinker_path": await run_in_threadpool(copy)})


@router.get("/training_runs")
def list_training_runs(principal: Reading, app: App, offset: Offset = 0, limit: Count = 20) -> Response:
    """Models of the project, newest first."""
    return JSONResponse(runs.training_runs(Door(app, principal), offset, limit))


@router.get("/training_runs/{run_id}")
def show_training_run(run_id: str, principal: Reading, app: App) -> Response:
    """A model."""
    of = Door(app, principal)
    return JSONResponse(runs.training_run(of, of.run(run_id)))


@router.get("/training_runs/{run_id}/checkpoints")
def list_of_run(run_id: str, principal: Reading, app: App, offset: Offset = 0, limit: Count = 1000) -> Response:
    """What a model has saved, newest first."""
    return JSONResponse(runs.checkpoints(Door(app, principal), run_id, offset, limit))


@router.get("/checkpoints")
def list_checkpoints(principal: Reading, app: App, offset: Offset = 0, limit: Count = 100) -> Response:
    """What all models of the project have saved, newest first."""
    return JSONResponse(runs.checkpoints(Door(app, principal), None, offset, limit))


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{label}")
def delete_checkpoint(run_id: str, kind: Kind, label: str, principal: Writing, app: App) -> Response:
    """Delete what was saved. Its files go when no session needs them any more to compute its log again."""
    runs.expire(Door(app, principal), run_id, kind, label, 0)
    return Response(status_code=204)


@router.put("/training_runs/{run_id}/checkpoints/{kind}/{label}/ttl")
async def set_ttl(request: Request, run_id: str, kind: Kind, label: str, principal: Writing, app: App) -> Response:
    """Let it go so many seconds from now; null: never."""
    wish = bodies.parsed(bodies.NewTtl, await read_body(request, app.settings.max_body_bytes))
    await run_in_threadpool(runs.expire, Door(app, principal), run_id, kind, label, wish.ttl_seconds)
    return Response(status_code=204)


@router.post("/training_runs/{run_id}/checkpoints/{kind}/{label}/publish")
def publish(run_id: str, kind: Kind, label: str, principal: Writing, app: App) -> Response:
    """Let all projects of this box read it, and nobody change it."""
    runs.publish(Door(app, principal), run_id, kind, label, True)
    return Response(status_code=204)


@router.delete("/training_runs/{run_id}/checkpoints/{kind}/{label}/publish")
def unpublish(run_id: str, kind: Kind, label: str, principal: Writing, app: App) -> Response:
    """Let no other project read it any more. Models that were made of it stay as they are."""
    runs.publish(Door(app, principal), run_id, kind, label, False)
    return Response(status_code=204)


@router.get("/sessions")
def list_tinker_sessions(principal: Reading, app: App, offset: Offset = 0, limit: Count = 20) -> Response:
    """Sessions of the SDK that have made a model or a sampler."""
    return JSONResponse(runs.sessions(Door(app, principal), offset, limit))


@router.get("/sessions/{session_id}")
def show_tinker_session(session_id: str, principal: Reading, app: App) -> Response:
    """Models and samplers of a session of the SDK."""
    return JSONResponse(runs.session(Door(app, principal), session_id))


@router.put("/sessions/{session_id}/project")
async def move_session(request: Request, session_id: str, principal: Writing, app: App) -> Response:
    """A session is in the project of the key that opened it, and stays there."""
    wish = bodies.parsed(bodies.Moved, await read_body(request, app.settings.max_body_bytes))
    await run_in_threadpool(runs.session, Door(app, principal), session_id)
    if wish.project_id not in (principal.project_id, principal.project_name):
        words = (
            f"a session stays in the project of its key, `{principal.project_name}`: open it with a key of the other"
        )
        raise SpecError(words, field="project_id", code="invalid_value")
    return Response(status_code=204)
