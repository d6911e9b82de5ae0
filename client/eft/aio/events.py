"""What happens to a job, as it happens."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from eft.aio import io
from eft.aio.jobs import AsyncJobs
from eft.errors import EftClientError, Unreachable
from eft.http import paths
from eft.http.responses import FIRST_DELAY, LONGEST_DELAY, Param, backoff
from eft.http.sse import Decoder
from eft.types import Event, Job, Snapshot

T = TypeVar("T")

STREAM_SILENCE = 60.0
"""Seconds without a byte after which an event stream counts as dead; the server sends keep-alives more often."""


class AsyncEvents(AsyncJobs):
    async def events(
        self,
        job_id: str,
        *,
        after: int = 0,
        patience: float = 300.0,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> AsyncIterator[Event]:
        """Everything that happened and happens to a job, from the event behind `after` to its end.

        Survives a restart of the server: after a broken connection it asks again behind the last event it has seen, so
        none is lost or told twice. Gives up (Unreachable, ApiError) when the server is away for `patience` seconds;
        `on_gap` is told of every break.
        """
        last, delay, down_since = after, FIRST_DELAY, None
        while True:
            try:
                headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(last)} if last else {})
                async with self._transport.stream(
                    "GET", f"{paths.job(job_id)}/events", headers=headers, timeout=STREAM_SILENCE
                ) as response:
                    delay, down_since = FIRST_DELAY, None
                    decoder = Decoder()
                    async for chunk in response.aiter_bytes():
                        for message in decoder.feed(chunk):
                            if message.event == "end":
                                return
                            event = Event.parse(json.loads(message.data))
                            if event.seq > last:
                                last = event.seq
                                yield event
                raise Unreachable("the event stream ended before the job did")
            except EftClientError as error:
                now = time.monotonic()
                down_since = now if down_since is None else down_since
                pause = backoff(error, delay)
                if pause is None or now + pause - down_since > patience:
                    raise
                if on_gap is not None:
                    on_gap(error)
            await io.sleep(pause)
            delay = min(delay * 2, LONGEST_DELAY)

    async def wait(
        self,
        job_id: str,
        *,
        patience: float = 300.0,
        on_event: Callable[[Event], None] | None = None,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> Job:
        """Until the job has ended; returns it."""
        async for event in self.events(job_id, patience=patience, on_gap=on_gap):
            if on_event is not None:
                on_event(event)
        return await self.persist(lambda: self.get(job_id), patience)

    async def follow(
        self,
        job_id: str,
        *,
        interval: float = 1.0,
        patience: float = 300.0,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> AsyncIterator[Snapshot]:
        """Look every `interval` seconds until the job has ended: its state, what is new, and the latest loss.

        For a progress bar: steps and losses are no events (there may be millions of them). Every event comes once.
        """
        seen, step, loss = 0, -1, None
        while True:
            # The job first: its last event is then in the page that is asked for behind it.
            job = await self.persist(lambda: self.get(job_id), patience, on_gap)
            events: list[Event] = []
            while True:
                page = await self.persist(partial(self.event_page, job_id, after=seen), patience, on_gap)
                events += [Event.parse(raw) for raw in page["data"]]
                seen = events[-1].seq if events else seen
                if not page["has_more"]:
                    break
            if job.progress is not None and job.progress.step != step:
                step = job.progress.step
                curves = await self.persist(lambda: self.metrics(job_id, names=["loss"], points=2), patience, on_gap)
                curve = curves.get("loss")
                loss = curve[-1][1] if curve else loss
            yield Snapshot(job, events, loss)
            if job.finished:
                return
            await io.sleep(interval)

    async def event_page(self, job_id: str, *, after: int = 0, limit: int = 1000) -> dict[str, Any]:
        """What has happened so far behind event number `after`: `data`, oldest first, and `has_more`."""
        params: dict[str, Param] = {"format": "json", "after": after, "limit": limit}
        page: dict[str, Any] = await self._transport.json("GET", f"{paths.job(job_id)}/events", params=params)
        return page

    async def persist(
        self,
        call: Callable[[], Awaitable[T]],
        patience: float,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> T:
        """Make a call of this client again and again while the server is away, for at most `patience` seconds."""
        return await self._transport.persist(call, patience, on_gap)
