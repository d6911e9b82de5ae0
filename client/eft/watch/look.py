"""Looking at the server again and again, also past its restarts."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from eft.errors import ApiError, EftClientError
from eft.http.responses import FIRST_DELAY, backoff
from eft.terminal.output import number
from eft.terminal.progress import event_words
from eft.types import Event, Job
from eft.watch.world import JOBS, QUEUE, Line, Watched, World

if TYPE_CHECKING:
    from eft.client import Client

AT_WORK = ("preparing", "starting", "running", "pausing", "stopping")
LONGEST_WAIT = 2.0
"""Seconds between two tries while the server is away: somebody sits in front of it."""
POINTS = 120
"""Points of a loss curve that are kept, more than a sparkline has places."""
ENDED, LINES = 10, 200
"""How many of each are kept."""


class Look:
    """Follows one job or all. `world` is the newest state; `on_change` is called for each newer one."""

    def __init__(
        self, client: Client, job_id: str | None, *, interval: float, patience: float, on_change: Callable[[], None]
    ) -> None:
        self.world = World(one=job_id)
        self._client, self._interval, self._patience = client, interval, patience
        self.on_change = on_change
        self._stop, self._wake = threading.Event(), threading.Event()
        self._target = job_id
        self._asked: deque[tuple[str, str]] = deque()
        """Actions and jobs, as keys have asked for them."""
        self._seen: dict[str, int] = {}
        """Job → the last event told."""
        self._begun = datetime.now(UTC)
        self._thread = threading.Thread(target=self._run, name="look", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 2.0) -> None:
        """Whatever it waits for: it is told, and left to itself when it does not come within `seconds`."""
        self._stop.set()
        self._wake.set()
        self._thread.join(seconds)

    def follow(self, job_id: str | None) -> None:
        """Look at this job from now on; None: at all."""
        self._target = job_id
        self._wake.set()

    def ask(self, action: str, job_id: str) -> None:
        """`pause`, `resume` or `cancel` a job. A refusal becomes a line of what has happened."""
        self._asked.append((action, job_id))
        self._wake.set()

    def _run(self) -> None:
        delay = FIRST_DELAY
        while not self._stop.is_set():
            try:
                self._act()
                self._put(self._once(self.world))
                wait, delay = self._interval, FIRST_DELAY
            except EftClientError as error:
                since = self.world.away_since or time.monotonic()
                pause = backoff(error, delay)
                if pause is None or time.monotonic() - since > self._patience:
                    self._put(replace(self.world, error=error))
                    return
                lines = self.world.lines
                if self.world.away_since is None:
                    lines = _with(lines, None, "the server is away; trying again")
                self._put(replace(self.world, away_since=since, away_why=error.message, lines=lines))
                wait, delay = pause, min(delay * 2, LONGEST_WAIT)
            except Exception as error:  # a thread has nobody above it: the one that draws raises it
                self._put(replace(self.world, error=error))
                return
            self._wake.wait(wait)
            self._wake.clear()

    def _act(self) -> None:
        while self._asked:
            action, job_id = self._asked[0]
            try:
                getattr(self._client, action)(job_id)
            except ApiError as error:
                if backoff(error, FIRST_DELAY) is not None:
                    raise  # asked again once the server is back
                self.world = replace(self.world, lines=_with(self.world.lines, job_id, f"not done: {error.message}"))
            self._asked.popleft()

    def _put(self, world: World) -> None:
        self.world = world
        self.on_change()

    def _once(self, old: World) -> World:
        lines = old.lines
        if old.away_since is not None:
            lines = _with(lines, None, f"the server is back after {time.monotonic() - old.away_since:.0f} s")
        before = {one.job.id: one for one in old.jobs}
        one = self._target
        if one is not None:
            job = self._client.get(one)
            chosen, ended, queue = [job], [], []
        else:
            chosen = self._client.jobs(status=AT_WORK, limit=JOBS).jobs
            ended = self._client.jobs(status=("succeeded", "failed", "cancelled", "paused"), limit=ENDED).jobs
            queue = self._client.queue.show(limit=QUEUE)
        for job in sorted([*ended, *chosen], key=lambda job: job.created_at):
            for event in self._new_events(job, everything=one is not None):
                words = event_words(event)
                if words is not None:
                    lines = _with(lines, job.id, words, event.time)
        jobs = tuple(self._watched(job, before.get(job.id)) for job in chosen)
        return World(
            one=one,
            jobs=jobs,
            ended=tuple(ended),
            queue=tuple(queue),
            gpus=tuple(self._gpus()),
            lines=tuple(sorted(lines, key=lambda line: line.at))[-LINES:],
            looked=True,
        )

    def _gpus(self) -> list[dict[str, object]]:
        try:
            return self._client.queue.gpus()
        except ApiError as error:
            if error.status in (403, 404):
                return []  # a key that may not see them
            raise

    def _new_events(self, job: Job, *, everything: bool) -> list[Event]:
        """Those behind the last one told. Of a job first seen among all others: only what is younger than the watch."""
        known = self._seen.get(job.id)
        if known is None and not everything and job.finished and _moment(job.finished_at) < self._begun:
            self._seen[job.id] = 1 << 62
            return []
        if known == 1 << 62:
            return []
        fresh: list[Event] = []
        after = known or 0
        while True:
            page = self._client.event_page(job.id, after=after)
            fresh += [Event.parse(raw) for raw in page["data"]]
            after = fresh[-1].seq if fresh else after
            if not page["has_more"]:
                break
        # The job was looked at before its events: when it had ended by then, these were all.
        self._seen[job.id] = 1 << 62 if job.finished else after
        if known is None and not everything:
            fresh = fresh[-3:]
        return fresh

    def _watched(self, job: Job, before: Watched | None) -> Watched:
        if before is not None and before.job.progress == job.progress and before.job.status == job.status:
            return replace(before, job=job)
        if job.progress is None:
            return Watched(job)
        curves = self._client.metrics(job.id, names=["loss", "tokens_per_second", "eval_loss"], points=POINTS)
        points = curves.get("loss", [])
        loss, steps = tuple(value for _, value in points), tuple(int(step) for step, _ in points)
        speed = curves.get("tokens_per_second")
        held = curves.get("eval_loss")
        return Watched(
            job,
            loss,
            f"eval_loss {number(held[-1][1])} at step {held[-1][0]}" if held else "",
            speed[-1][1] if speed else None,
            steps,
        )


def _with(lines: tuple[Line, ...], job: str | None, words: str, at: str | None = None) -> tuple[Line, ...]:
    return (*lines, Line(_moment(at).astimezone(), job, words))


def _moment(at: str | None) -> datetime:
    return datetime.now(UTC) if at is None else datetime.fromisoformat(at)
