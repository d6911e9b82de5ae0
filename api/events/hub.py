"""Followers of jobs and pipelines: one look at the database a second for all, every event encoded once, all woken.

A follower first replays from the database what lies behind its Last-Event-ID, then goes on from the tail that the
hub keeps in memory; one that falls behind the tail replays again. Memory: the tail of each watched job.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from api.pipelines.schemas import event_view
from core.db.engine import Database
from core.db.tables import Event
from core.jobs.base.states import FINAL, Status
from core.jobs.lifecycle.pipelines import records
from core.jobs.lifecycle.pipelines.records import PipelineHead
from core.jobs.views import queries
from core.jobs.views.queries import JobHead

log = logging.getLogger("eft.api.events")

POLL_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 15.0
TAIL = 1000
"""Events kept in memory of one watched job."""
REPLAY_ROWS = 500
KEEP_ALIVE = b": keep-alive\n\n"
GOODBYE = b": the server stops; connect again with Last-Event-ID\n\n"


@dataclass(slots=True)
class Watch:
    """A job that somebody follows."""

    position: int
    """Number of the newest event in the tail, or the one before it."""
    status: Status
    tail: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=TAIL))
    followers: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def after(self, seq: int) -> list[tuple[int, bytes]] | None:
        """Events behind `seq`; None when the tail does not reach back that far."""
        first = self.tail[0][0] if self.tail else self.position + 1
        if seq + 1 < first:
            return None
        return [item for item in self.tail if item[0] > seq]

    def wake(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class Hub:
    """All watches of one API process. Lives on the event loop; the database is asked in threads.

    They are asyncio's own threads, which nothing else here uses: requests that wait for a lock in Starlette's pool
    do not keep the followers waiting.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._watches: dict[str, Watch] = {}
        self._poller: asyncio.Task[None] | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._others: list[Callable[[], None]] = []

    @property
    def followers(self) -> int:
        return sum(watch.followers for watch in self._watches.values())

    def closes_too(self, close: Callable[[], None]) -> None:
        """Call it, on the event loop, when the streams here end."""
        self._others.append(close)

    def runs_on(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def close_soon(self) -> None:
        """`close`, from a signal handler."""
        self._closing = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.close)

    def close(self) -> None:
        """End all streams, so that a server that stops need not wait for their readers."""
        self._closing = True
        for watch in self._watches.values():
            watch.wake()
        if self._poller is not None:
            self._poller.cancel()
        for close in self._others:
            close()

    async def follow(self, job_id: str, after: int) -> AsyncGenerator[bytes]:
        """The job's events behind number `after`, as they come, until it is final. The job must exist."""
        self.runs_on(asyncio.get_running_loop())
        watch = await self._join(job_id)
        try:
            seen = after
            while not self._closing:
                news = watch.news  # before looking: an event between the look and the wait must not be missed
                status, position = watch.status, watch.position
                items = watch.after(seen)
                if items is None:
                    items = await asyncio.to_thread(self._replay, job_id, seen)
                for seq, encoded in items:
                    seen = seq
                    yield encoded
                if items:
                    continue
                if status in FINAL and seen >= position:
                    yield encode("end", {"status": status.value})
                    return
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await news.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
            yield GOODBYE
        finally:
            self._leave(job_id, watch)

    async def _join(self, job_id: str) -> Watch:
        watch = self._watches.get(job_id)
        if watch is None:
            head = (await asyncio.to_thread(self._heads, [job_id]))[job_id]
            # Somebody else may have come while the thread was reading.
            watch = self._watches.setdefault(job_id, Watch(position=head.event_seq, status=head.status))
        watch.followers += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(), name="event hub")
        return watch

    def _leave(self, job_id: str, watch: Watch) -> None:
        watch.followers -= 1
        if watch.followers == 0:
            del self._watches[job_id]
            if not self._watches and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                await self._look()
            except Exception:
                log.exception("the database cannot be asked for events; followers wait, the next look is in a second")

    async def _look(self) -> None:
        open_watches = {job_id: watch for job_id, watch in self._watches.items() if watch.status not in FINAL}
        if not open_watches:
            return
        heads = await asyncio.to_thread(self._heads, list(open_watches))
        for job_id, head in heads.items():
            watch = open_watches[job_id]
            if head.event_seq > watch.position:
                while watch.position < head.event_seq:
                    items = await asyncio.to_thread(self._replay, job_id, watch.position)
                    if not items:
                        break
                    watch.tail.extend(items)
                    watch.position = items[-1][0]
            elif head.status is watch.status:
                continue
            watch.status = head.status
            watch.wake()

    def _heads(self, job_ids: Sequence[str]) -> dict[str, JobHead | PipelineHead]:
        with self._database.read() as session:
            return queries.heads(session, job_ids) | records.heads(session, job_ids)

    def _replay(self, job_id: str, after: int) -> list[tuple[int, bytes]]:
        with self._database.read() as session:
            if job_id.startswith(records.PREFIX):
                told = records.events_after(session, job_id, after, REPLAY_ROWS)
                return [(row.seq, encode(row.type, event_view(row), row.seq)) for row in told]
            rows = queries.events_after(session, job_id, after, REPLAY_ROWS)
            return [(row.seq, encode(row.type, view(row), row.seq)) for row in rows]


def view(event: Event) -> dict[str, Any]:
    """One event as streams and pages show it."""
    return {
        "seq": event.seq,
        "type": event.type,
        "time": datetime.fromtimestamp(event.time, UTC).isoformat().replace("+00:00", "Z"),
        "attempt": event.attempt,
        "data": event.data,
    }


def encode(kind: str, data: dict[str, Any], seq: int | None = None) -> bytes:
    """The wire form of https://html.spec.whatwg.org/multipage/server-sent-events.html; JSON has no line breaks."""
    identity = f"id: {seq}\n" if seq is not None else ""
    return f"{identity}event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(
        errors="replace"
    )
