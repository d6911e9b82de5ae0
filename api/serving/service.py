"""From a request to the pieces of its answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

import anyio

from api.deps import AppState
from api.errors import ServiceUnavailable
from api.jobs.service import Jobs
from api.serving.bodies import ChatBody, CompletionBody
from core.errors import EftError, SpecError
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.serving import requests
from core.jobs.policies.volume import VolumeLimits
from core.jobs.views import served

log = logging.getLogger("eft.api.serving")

FIRST_LOOK, LONGEST_LOOK = 0.01, 0.05
"""Seconds between two looks for pieces."""
TOUCH_SECONDS = 2.0
"""Between two notes that the caller is there."""


class AnsweredError(EftError):
    """What the serving process has refused, or failed at."""

    status = 400

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"], field=error.get("field"), code=error["code"])
        if error["code"] == "checkpoint_not_found":
            self.status = 404
        elif error["code"] in ("out_of_memory", requests.Interrupted.code):
            self.status = 503


def ask(app: AppState, actor: Actor, body: ChatBody | CompletionBody) -> str:
    """Write a request down; its id. Raises NotFound, SpecError, QueueFull, NoSpace."""
    settings = app.settings
    if settings.is_remote:
        words = "models are served from a data root that is a folder; this one is an object store (EFT_DATA)"
        raise SpecError(words, code="serving_needs_folder")
    with app.database.read() as session:
        model = served.find(session, actor, app.store, body.model)
    request = body.request(model.adapter, settings.serving_max_tokens)
    bounds = VolumeLimits.of(settings)
    job = None
    while True:
        with app.database.write() as session:
            number = requests.ask(
                session,
                actor,
                model.base,
                model.chain,
                job,
                request,
                streamed=body.streamed,
                most=settings.max_completions,
                bounds=bounds,
            )
        if number is not None:
            return number
        jobs = Jobs(app.database, settings, app.layout)
        document = model.spec.as_job().model_dump(mode="json")
        job = jobs.resolved(actor, document, rowless=True)
        app.layout.require_space(settings.min_free_bytes)


async def follow(app: AppState, number: str) -> AsyncGenerator[dict[str, Any] | None]:
    """What the serving process says until its answer is whole; None now and then while nothing comes. The request is
    dropped at the end, whoever ends it. Raises AnsweredError, Interrupted, Unserved, ServiceUnavailable."""
    seen, pause = 0, FIRST_LOOK
    heard = touched = time.monotonic()
    try:
        while True:
            found = await asyncio.to_thread(_look, app, number, seen)
            now = time.monotonic()
            for news in found.news:
                if (error := news.get("error")) is not None:
                    raise AnsweredError(error)
                yield news
                if "done" in news:
                    return
            if found.news:
                seen, heard, pause = found.seen, now, FIRST_LOOK
                continue
            if now - heard > app.settings.serving_wait_seconds:
                words = f"no answer within {app.settings.serving_wait_seconds:g} s (EFT_SERVING_WAIT_SECONDS)"
                raise ServiceUnavailable(f"{words}: {found.reason}", code="serving_timeout")
            if found.parked or now - touched > TOUCH_SECONDS:
                touched = now
                await asyncio.to_thread(_touch, app, number)
                yield None
            await asyncio.sleep(pause)
            pause = min(pause * 1.3, LONGEST_LOOK)
    finally:
        with anyio.CancelScope(shield=True):
            await asyncio.to_thread(_forget, app, number)


def encode(data: dict[str, Any]) -> bytes:
    """An event of a stream, as OpenAI sends them."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n\n"


def _look(app: AppState, number: str, seen: int) -> requests.SeenRequest:
    with app.database.read() as session:
        return requests.look(session, number, seen)


def _touch(app: AppState, number: str) -> None:
    with app.database.write() as session:
        requests.touch(session, number)


def _forget(app: AppState, number: str) -> None:
    with app.database.write() as session:
        requests.forget(session, number)
