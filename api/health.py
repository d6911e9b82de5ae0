"""Is the process alive, can it do its work, which version is it."""

from __future__ import annotations

import os
from typing import Any, Literal

import redis
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from api.deps import Here, Installation
from api.errors import responses
from core import __version__
from core.db import migrate
from core.spec.job import SPEC_VERSION

router = APIRouter(tags=["service"])

BROKER_TIMEOUT = 1.0


class Health(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
    status: Literal["ok"]


class Check(BaseModel):
    """One thing the service needs."""

    ok: bool
    detail: str


class Readiness(BaseModel):
    model_config = ConfigDict(
        use_attribute_docstrings=True,
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
    checks: dict[str, Check]
    followers: int
    """Open event streams of this process."""


class Version(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"version": __version__, "spec_version": SPEC_VERSION}]})
    version: str
    spec_version: int


@router.get("/healthz", summary="Alive?", response_model=Health, response_class=JSONResponse)
async def healthz() -> Response:
    """200 while the process answers at all. Asks nobody else, needs no key."""
    return JSONResponse({"status": "ok"})


@router.get(
    "/readyz",
    summary="Ready to work?",
    response_model=Readiness,
    response_class=JSONResponse,
    responses={503: {"model": Readiness, "description": "Something is missing; the checks say what."}},
)
def readyz(here: Here) -> Response:
    """Database, its schema, broker and data root, each with what is wrong. Needs no key."""
    checks = {**database_checks(here), "broker": _broker(here), "data": _data(here)}
    ready = all(check["ok"] for check in checks.values())
    body = {"status": "ready" if ready else "not_ready", "checks": checks, "followers": here.hub.followers}
    return JSONResponse(body, 200 if ready else 503)


@router.get("/version", summary="Version", response_model=Version, response_class=JSONResponse, responses=responses())
async def version() -> Response:
    """Of the service and of the job spec. Needs no key."""
    return JSONResponse({"version": __version__, "spec_version": SPEC_VERSION})


def _check(ok: bool, detail: str) -> dict[str, Any]:
    return {"ok": ok, "detail": detail}


def database_checks(here: Installation) -> dict[str, Any]:
    """Does it answer, and is it at the revision this code was written for."""
    try:
        current = migrate.current(here.database)
    except Exception as error:  # whatever the driver raises, the answer is: not ready
        words = f"does not answer ({type(error).__name__})"
        return {"database": _check(False, words), "schema": _check(False, "unknown")}
    head = migrate.head()
    if current == head:
        schema = _check(True, head)
    else:
        schema = _check(False, f"is at {current or 'nothing'}, this version needs {head}: run `eft migrate`")
    return {"database": _check(True, "answers"), "schema": schema}


def _broker(here: Installation) -> dict[str, Any]:
    url = here.settings.celery_broker_url.replace("redis+socket://", "unix://", 1)
    try:
        client = redis.Redis.from_url(url, socket_timeout=BROKER_TIMEOUT, socket_connect_timeout=BROKER_TIMEOUT)
        with client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        return _check(False, f"does not answer ({type(error).__name__})")
    return _check(True, "answers")


def _data(here: Installation) -> dict[str, Any]:
    try:
        found = os.statvfs(here.layout.files)
    except OSError as error:
        return _check(False, f"{error.strerror}")
    free = found.f_bavail * found.f_frsize
    if not os.access(here.layout.files, os.W_OK):
        return _check(False, "the data root cannot be written to")
    # Too little room refuses uploads and jobs in words; the API itself must stay, or nobody could delete anything.
    room = free >= here.settings.min_free_bytes
    return _check(True, f"{free >> 20} MiB free" + ("" if room else ", less than the reserve"))
