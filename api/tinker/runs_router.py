"""`/api/v1`: the part of Tinker's protocol that lists what was trained and saved."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from api.auth.policy import Reading
from api.deps import App
from api.http.body import read_body
from api.tinker import bodies, runs
from api.tinker.door import Door

router = APIRouter(prefix="/api/v1", tags=["sessions"], include_in_schema=False)


@router.post("/weights_info")
async def weights_info(request: Request, principal: Reading, app: App) -> Response:
    """What saved weights are of."""
    wish = bodies.parsed(bodies.SavedPath, await read_body(request, app.settings.max_body_bytes))
    return JSONResponse(await run_in_threadpool(runs.weights_info, Door(app, principal), wish.tinker_path))
