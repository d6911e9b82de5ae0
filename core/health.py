"""Is what the service stands on there: database, schema, broker, data root. The API's /readyz and the doctor ask it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import redis

from core.db import migrate
from core.db.engine import Database

BROKER_TIMEOUT = 1.0
START_VARIABLE, START_HEADER = "EFT_START", "Eft-Start"
"""A name that `eft up` gives the API that it starts, and that this API answers on /healthz: another listener there
does not know it."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One thing the service needs."""

    ok: bool
    detail: str


def database(database: Database) -> dict[str, HealthCheck]:
    """Does it answer, and may this code use it as it is."""
    try:
        standing = migrate.standing(database)
    except Exception as error:  # whatever the driver raises, the answer is: not ready
        words = f"does not answer ({type(error).__name__})"
        return {"database": HealthCheck(False, words), "schema": HealthCheck(False, "unknown")}
    return {"database": HealthCheck(True, "answers"), "schema": HealthCheck(standing.fit, standing.words)}


def broker(celery_url: str) -> HealthCheck:
    """Whether the broker at `celery_url` (as Celery spells it) answers within a second."""
    url = celery_url.replace("redis+socket://", "unix://", 1)
    try:
        client = redis.Redis.from_url(url, socket_timeout=BROKER_TIMEOUT, socket_connect_timeout=BROKER_TIMEOUT)
        with client:
            client.ping()
    except (redis.RedisError, ValueError, OSError) as error:
        return HealthCheck(False, f"does not answer ({type(error).__name__})")
    return HealthCheck(True, "answers")


def data(folder: Path, reserve: int, over: Sequence[str] = ()) -> HealthCheck:
    """Whether `folder` of the data root can be written to. Less room than `reserve` bytes is told, and no failure: it
    refuses uploads and jobs in words, and the API itself must stay so that users can delete data."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return HealthCheck(False, f"{error.strerror}")
    free = found.f_bavail * found.f_frsize
    if not os.access(folder, os.W_OK):
        return HealthCheck(False, "the data root cannot be written to")
    words = f"{free >> 20} MiB free" + ("" if free >= reserve else ", less than the reserve")
    return HealthCheck(True, "; ".join([words, *over]))
