"""Requests that wait for results of sessions, woken by the workers of the same box."""

from __future__ import annotations

import asyncio
import os
import secrets
from weakref import WeakValueDictionary

from core.base import bells
from core.storage.layout import Layout

MOST_KNOWN = 10_000
LOOKS_A_SECOND = 50
"""Looks into the database of all requests that wait, whoever rings for them."""
MOST_PAUSE = 10.0


class Wakes:
    """What the workers of the box ring for in this process."""

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.bells
        self._bell: bells.Bell | None = None
        self._known = set[str]()
        self._waiting: dict[str, WeakValueDictionary[int | None, asyncio.Event]] = {}

    def start(self) -> None:
        """Hear rings on the running loop."""
        self._bell = bells.hung(self._folder, f"api-{os.getpid()}-{secrets.token_hex(4)}")
        if self._bell is not None:
            asyncio.get_running_loop().add_reader(self._bell.fileno(), self._hear)

    def close(self) -> None:
        if self._bell is not None:
            asyncio.get_running_loop().remove_reader(self._bell.fileno())
            self._bell.close()

    def of(self, session_id: str, position: int | None = None) -> asyncio.Event:
        """Set when an operation has been answered from now on; None: any one of the session."""
        waiting = self._waiting.setdefault(session_id, WeakValueDictionary())
        if (event := waiting.get(position)) is None:
            event = waiting[position] = asyncio.Event()
        return event

    def pause(self) -> float:
        """Seconds from one look of a waiting request to its next: more, the more of them wait."""
        return min(sum(map(len, self._waiting.values())) / LOOKS_A_SECOND, MOST_PAUSE)

    def rings_for(self, session_id: str) -> bool:
        """Whether the worker of a session is one of this box, as far as is known."""
        return session_id in self._known

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
