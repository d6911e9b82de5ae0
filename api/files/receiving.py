"""Bodies of uploads as they come, and work on them apart from that of all other routes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from api.deps import AppState
from api.errors import RequestTimeout

T = TypeVar("T")

BATCH_BYTES = 1 << 20
IDLE_SECONDS = 60.0
"""An upload that brings nothing for so long is given up."""


async def apart(
    request: Request, app: AppState, leave: Callable[[], None], work: Callable[..., T], *arguments: object
) -> T:
    """Work of an upload, on the threads that uploads have for themselves. Calls `leave` and raises ClientDisconnect as
    soon as the client has left."""
    gone: asyncio.Event | None = getattr(request.state, "gone", None)
    context = contextvars.copy_context()
    doing = asyncio.get_running_loop().run_in_executor(app.upload_threads, lambda: context.run(work, *arguments))
    if gone is None:
        return await doing
    leaving = asyncio.ensure_future(gone.wait())
    either: set[asyncio.Future[Any]] = {doing, leaving}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            doing.cancel()  # where it has not begun
            leave()
            await asyncio.gather(doing, return_exceptions=True)
            raise ClientDisconnect
        return doing.result()
    finally:
        leaving.cancel()


async def batches(request: Request) -> AsyncIterator[bytes]:
    """The body in pieces of about a MiB, so that few of them change threads."""
    stream = request.stream()
    batch = bytearray()
    while True:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                chunk = await anext(stream, None)
        except TimeoutError as error:
            raise RequestTimeout(f"the upload brought nothing for {IDLE_SECONDS:.0f} seconds") from error
        if chunk is None:
            break
        batch += chunk
        if len(batch) >= BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)
