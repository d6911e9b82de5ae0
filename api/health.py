"""Is the process alive, can it do its work, which version is it."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from api import joining
from api.auth.policy import PUBLIC
from api.deps import App
from api.http.errors import responses
from api.queue.settings import queue_settings
from core import __version__, health
from core.base.attribute_docs import AttributeDocsModel
from core.spec.job import SPEC_VERSION

router = APIRouter(tags=["service"], dependencies=[PUBLIC])


class Health(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
    status: Literal["ok"]


class CheckView(BaseModel):
    """One thing the service needs."""

    ok: bool
    detail: str


class Readiness(AttributeDocsModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "status": "ready",
                    "checks": {
                        "database": {"ok": True, "detail": "answers"},
                        "schema": {"ok": True, "detail": "0001"},
                        "broker": {"ok": True, "detail": "answers"},
                        "data": {"ok": True, "detail": "81920 MiB free"},
                    },
                    "followers": 0,
                }
            ]
        },
    )
    status: Literal["ready", "not_ready"]
    checks: dict[str, CheckView]
    followers: int
    """Open event streams of this process."""


class Version(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"version": __version__, "spec_version": SPEC_VERSION}]})
    version: str
    spec_version: int


LIMITED: dict[int | str, dict[str, Any]] = {429: responses()[429]}


@router.get("/healthz", summary="Alive?", response_model=Health, response_class=JSONResponse, responses=LIMITED)
async def healthz() -> Response:
    """200 while the process responds. It checks nothing else and needs no key."""
    start = os.environ.get(health.START_VARIABLE)
    return JSONResponse({"status": "ok"}, headers=None if start is None else {health.START_HEADER: start})


@router.get(
    "/readyz",
    summary="Ready to work?",
    response_model=Readiness,
    response_class=JSONResponse,
    responses={**LIMITED, 503: {"model": Readiness, "description": "Something is missing; the checks say what."}},
)
def readyz(app: App) -> Response:
    """State of database, schema, broker and data root, with the reason for each problem. Needs no key."""
    checks = {
        **health.database(app.database),
        "broker": health.broker(app.settings.celery_broker_url),
        "data": health.data(app.layout.files, app.settings.min_free_bytes),
    }
    if checks["schema"].ok and (over := queue_settings(app).over):
        words = [one.words() for one in over]
        checks["data"] = health.data(app.layout.files, app.settings.min_free_bytes, words)
    if all(checks[name].ok for name in ("database", "schema", "data")):
        seen = joining.data_root(app)
        checks |= {} if seen.ok else {"data": seen}
    ready = all(check.ok for check in checks.values())
    shown = {name: asdict(check) for name, check in checks.items()}
    body = {"status": "ready" if ready else "not_ready", "checks": shown, "followers": app.hub.followers}
    return JSONResponse(body, 200 if ready else 503)


@router.get("/version", summary="Version", response_model=Version, response_class=JSONResponse, responses=responses())
async def version() -> Response:
    """Versions of the service and of the job spec. Needs no key."""
    return JSONResponse({"version": __version__, "spec_version": SPEC_VERSION})
