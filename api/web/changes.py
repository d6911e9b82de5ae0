"""One stream for each open page: a word whenever something of a project or its boxes has changed.

A page that hears it asks for its own contents again; the stream itself carries no data. One look at the database a
second serves all listeners of a project in this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from core.db.engine import Database
from core.db.tables import Allocation, File, Job, Node

log = logging.getLogger("eft.api.web")

POLL_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(slots=True)
class _Listeners:
    """Those of one project."""

    count: int = 0
    state: str = ""
    """A hash of what they were told last; empty before the first look."""
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Changes:
    """Lives on the event loop; the database is asked in threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._projects: dict[str, _Listeners] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closing = False

    def close(self) -> None:
        """End all streams, so that a server that stops need not wait for their readers."""
        self._closing = True
        for listeners in self._projects.values():
            listeners.news.set()
        if self._poller is not None:
            self._poller.cancel()

    async def follow(self, project_id: str, seen: str) -> AsyncGenerator[bytes]:
        """Events `change`, whose id is the state that they tell of. `seen`: the state that the page has; a page that
        connects again hears at once whether it missed something."""
        listeners = self._projects.setdefault(project_id, _Listeners())
        listeners.count += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="changes for pages")
        try:
            listeners.state = await asyncio.to_thread(self._state, project_id)
            while not self._closing:
                news = listeners.news  # before looking: a change between the look and the wait must not be missed
                if listeners.state != seen:
                    first, seen = seen == "", listeners.state
                    yield f"id: {seen}\nevent: {'hello' if first else 'change'}\ndata: {{}}\n\n".encode()
                    continue
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await news.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
        finally:
            listeners.count -= 1
            if listeners.count == 0:
                self._projects.pop(project_id, None)
                if not self._projects and self._poller is not None:
                    self._poller.cancel()
                    self._poller = None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for project_id, listeners in list(self._projects.items()):
                try:
                    state = await asyncio.to_thread(self._state, project_id)
                except Exception:
                    log.exception("the database cannot be asked for changes; pages wait, the next look is in a second")
                    continue
                if state != listeners.state:
                    listeners.state = state
                    listeners.news.set()
                    listeners.news = asyncio.Event()

    def _state(self, project_id: str) -> str:
        with self._database.read() as session:
            found = fingerprint(session, project_id)
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def fingerprint(session: Session, project_id: str) -> list[int | float | str | None]:
    """Changes whenever a job of the project begins, ends or reports, a file comes or goes, or a slot of the box changes
    hands."""
    jobs = session.execute(
        select(func.count(), func.sum(Job.event_seq), func.max(Job.id)).where(Job.project_id == project_id)
    ).one()
    files = session.execute(select(func.count(), func.max(File.id)).where(File.project_id == project_id)).one()
    held = Allocation.released_at.is_(None)
    slots = session.execute(select(func.count(), func.max(Allocation.created_at)).where(held)).one()
    nodes = session.execute(select(func.count(), func.max(Node.drained_at))).one()
    return [*jobs, *files, *slots, *nodes]
