"""Requests that wait for results of sessions, woken by the workers of the same box."""

from __future__ import annotations

import asyncio
import os
import secrets
from weakref import WeakValueDictionary

from core.base import bells
from core.storage.layout import Layout

MOST_KNOWN = 10_000


class Wakes:
    """What the workers of the box ring for in this process."""

    def __init__(self, layout: Layout) -> None:
        self._folder = layout.bells
        self._bell: bells.Bell | None = None
        self._known = set[str]()
        self._waiting: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

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
        key = session_id if position is None else f"{session_id}.{position}"
        if (event := self._waiting.get(key)) is None:
            event = self._waiting[key] = asyncio.Event()
        return event

    def rings_for(self, session_id: str) -> bool:
        """Whether the worker of a session is one of this box, as far as is known."""
        return session_id in self._known

    def _hear(self) -> None:
        assert self._bell is not None
        for what in self._bell.heard():
            session_id = what.partition(".")[0]
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known.add(session_id)
            for key in (what, session_id):
                if (event := self._waiting.pop(key, None)) is not None:
                    event.set()
