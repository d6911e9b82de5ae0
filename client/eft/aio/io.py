"""What waiting is, for the asynchronous client. Its counterpart, eft/sync/io.py, is the one other file kept by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
from anyio import to_thread

T = TypeVar("T")

sleep = anyio.sleep


async def run(work: Callable[[], T]) -> T:
    """Disks are slow and hashing gigabytes takes seconds: neither may hold up the event loop."""
    return await to_thread.run_sync(work)
