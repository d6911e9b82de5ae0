"""The part of Tinker's protocol by which saved weights leave the box, and the links that it gives out."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, Response

from api.auth.policy import PUBLIC, Reading, Writing
from api.deps import App
from api.http.body import read_body
from api.tinker import downloads
from api.tinker.door import Door
from api.tinker.forms import bodies
from api.tinker.runs_router import Kind

router = APIRouter(prefix="/api/v1", tags=["sessions"], include_in_schema=False)
open_router = APIRouter(tags=["sessions"], include_in_schema=False, dependencies=[PUBLIC])


@router.post("/save_weights_external")
async def save_weights_external(request: Request, principal: Writing, app: App) -> Response:
    """Save the adapter to be fetched from elsewhere."""
    wish = bodies.parsed(bodies.ExternalSave, await read_body(request, app.settings.max_body_bytes))
    keys = wish.age_encryption_recipients or []
    downloads.recipients(keys)
    ticket = await run_in_threadpool(Door(app, principal).save, wish, "external_weights", keys)
    return JSONResponse({"request_id": ticket})


@router.get("/training_runs/{run_id}/checkpoints/external_weights/{label}/external_weights_urls")
def external_weights_urls(run_id: str, label: str, request: Request, principal: Reading, app: App) -> Response:
    """A link to each file of what was saved so."""
    of = Door(app, principal)
    found, row = of.saved(f"tinker://{run_id}/external_weights/{label}")
    given = {name: downloads.link(of, _base(request), row, name) for name in downloads.files(of, found, row)}
    until = min(at for _, at in given.values())
    return JSONResponse({"urls": {name: url for name, (url, _) in given.items()}, "expires": _time(until)})


@router.get("/training_runs/{run_id}/checkpoints/{kind}/{label}/archive")
def archive(run_id: str, kind: Kind, label: str, request: Request, principal: Reading, app: App) -> Response:
    """A link to a tar of saved weights, for SDKs up to 0.34."""
    of = Door(app, principal)
    found, row = of.saved(f"tinker://{run_id}/{kind}/{label}")
    url, until = downloads.link(of, _base(request), row, downloads.archive(of, found, row))
    at = format_datetime(datetime.fromtimestamp(until, UTC), usegmt=True)
    return JSONResponse({"url": url, "expires": _time(until)}, 302, headers={"location": url, "expires": at})


@open_router.get("/downloads/{token}/{name}")
def download(token: str, name: str, app: App) -> Response:
    """A file of saved weights, by a link that was given out."""
    path = downloads.fetched(app.layout, token, name)
    return FileResponse(path, media_type="application/octet-stream", headers={"cache-control": "no-store"})


def _base(request: Request) -> str:
    """Address of this service as the caller knows it."""
    return str(request.base_url)


def _time(at: float) -> Any:
    return datetime.fromtimestamp(at, UTC).isoformat()
