"""Requests that wait for results of sessions, woken by the workers of the same box."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from weakref import WeakValueDictionary

from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError

from api.http.waiting import GROWTH
from core.base import bells
from core.jobs.base.states import FINAL, Status
from core.storage.layout import Layout

MOST_KNOWN = 10_000
FIRST_LOOK, LONGEST_LOOK = 0.004, 0.1
"""Seconds between two looks for results whose ends nobody rings for: their worker is on another box."""
RUNG_LOOK = 2.0
"""The same where somebody rings, since a ring may be lost."""

Look = Callable[[str, int], tuple[str, list[int]]]
"""Status of a session, and which of its operations from a position on have been answered."""


class Wakes:
    """What the workers of the box ring for in this process. One task a session looks into the database for all of its
    requests that wait, so that thousands of them cost no more than one."""

    def __init__(self, layout: Layout, look: Look) -> None:
        self._folder, self._look = layout.bells, look
        self._bell: bells.Bell | None = None
        self._known = set[str]()
        self._waiting: dict[str, WeakValueDictionary[int | None, asyncio.Event]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Hear rings on the running loop."""
        self._bell = bells.hung(self._folder, f"api-{os.getpid()}-{secrets.token_hex(4)}")
        if self._bell is not None:
            asyncio.get_running_loop().add_reader(self._bell.fileno(), self._hear)

    def close(self) -> None:
        for watch in self._watches.values():
            watch.cancel()
        if self._bell is not None:
            asyncio.get_running_loop().remove_reader(self._bell.fileno())
            self._bell.close()

    def of(self, session_id: str, position: int | None = None) -> asyncio.Event:
        """Set when an operation has been answered from now on, or its session has ended; None: any one of the session,
        as far as somebody rings."""
        waiting = self._waiting.setdefault(session_id, WeakValueDictionary())
        if (event := waiting.get(position)) is None:
            event = waiting[position] = asyncio.Event()
        if position is not None and session_id not in self._watches:
            self._watches[session_id] = asyncio.create_task(self._watch(session_id))
        return event

    async def _watch(self, session_id: str) -> None:
        """Look for all who wait, as long as somebody does."""
        pause = FIRST_LOOK
        try:
            while positions := [one for one in self._waiting.get(session_id, ()) if one is not None]:
                await asyncio.sleep(RUNG_LOOK if session_id in self._known else pause)
                pause = min(pause * GROWTH, LONGEST_LOOK)
                try:
                    status, answered = await run_in_threadpool(self._look, session_id, min(positions))
                except SQLAlchemyError:
                    self._wake(session_id, positions)  # each looks for itself, and tells its client what is wrong
                    continue
                if Status(status) in FINAL:
                    answered = positions
                elif Status(status) is Status.PAUSED and not answered:
                    answered = positions[:1]  # its look brings back a session that was being parked
                self._wake(session_id, answered)
        finally:
            self._watches.pop(session_id, None)
            if not self._waiting.get(session_id):
                self._waiting.pop(session_id, None)

    def _wake(self, session_id: str, positions: list[int]) -> None:
        waiting = self._waiting.get(session_id) or WeakValueDictionary[int | None, asyncio.Event]()
        for position in positions:
            if (event := waiting.pop(position, None)) is not None:
                event.set()

    def _hear(self) -> None:
        assert self._bell is not None
        for what in self._bell.heard():
            session_id, _, told = what.partition(".")
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(session_id)
            waiting = self._waiting.get(session_id) or WeakValueDictionary[int | None, asyncio.Event]()
            answered = int(told) if told.isdecimal() else 0
            # Operations are answered in their order, so that a ring makes up for those before it that were lost.
            for position in [one for one in waiting if one is None or one <= answered]:
                if (event := waiting.pop(position, None)) is not None:
                    event.set()
            if not waiting:
                self._waiting.pop(session_id, None)
