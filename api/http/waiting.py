"""Requests that wait: the database is asked again and again until something is over, or their time is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response

from core.jobs.base.states import FINAL, Status

LONGEST_LOOK = 0.25
GROWTH = 1.5

Wait = Annotated[float, Query(ge=0, le=60, description="Seconds to wait for its end before answering.")]

T = TypeVar("T")


async def until(
    over: Callable[[T], bool],
    look: Callable[[], T],
    seconds: float,
    *,
    first: float = LONGEST_LOOK,
    longest: float = LONGEST_LOOK,
    request: Request | None = None,
    rung: Callable[[], asyncio.Event] | None = None,
) -> T:
    """What `look` finds once it is `over`, `seconds` have passed, or the client of `request` has left. It looks in a
    thread; the pauses between looks grow from `first` to `longest` seconds. `rung` makes an event that ends a pause."""
    deadline, pause = time.monotonic() + seconds, first
    while True:
        event = None if rung is None else rung()  # before the look: what comes meanwhile is not missed
        found = await run_in_threadpool(look)
        left = deadline - time.monotonic()
        if over(found) or left <= 0 or (request is not None and await request.is_disconnected()):
            return found
        await _pause(min(pause, left), event)
        pause = min(pause * GROWTH, longest)


async def _pause(seconds: float, event: asyncio.Event | None) -> None:
    if event is None:
        await asyncio.sleep(seconds)
        return
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def has_ended(view: dict[str, Any]) -> bool:
    """Whether the task of a view has a final status."""
    return Status(view["status"]) in FINAL


def asked_for(asked: Response, view: dict[str, Any]) -> Response:
    """The answer to a request that started a task. `asked`: what its transaction answered; `view`: the task now."""
    replayed = {name: value for name, value in asked.headers.items() if name == "idempotency-replayed"}
    headers = {"location": view["links"]["self"], **replayed}
    return JSONResponse(view, 200 if has_ended(view) else 202, headers=headers)
