"""What `eft watch` knows at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from eft.types import Job

JOBS, QUEUE = 20, 100
"""How many of each are asked for."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that happened."""

    at: datetime
    """By this machine's clock and zone."""
    job: str | None
    words: str


@dataclass(frozen=True, slots=True)
class Watched:
    """A job with what is drawn of it."""

    job: Job
    loss: tuple[float, ...] = ()
    """Its curve, thinned; a step may have no finite value."""
    evaluation: str = ""
    """The latest, in words."""
    tokens_per_second: float | None = None
    steps: tuple[int, ...] = ()
    """The steps of the curve's values."""


@dataclass(frozen=True, slots=True)
class World:
    """Never changed: the thread that looks makes a new one, the one that draws takes the newest."""

    one: str | None
    """The job that is watched; None: all of them."""
    jobs: tuple[Watched, ...] = ()
    """Those that are not waiting and have not ended, or the one."""
    ended: tuple[Job, ...] = ()
    """The last ones that have ended or are paused, newest first."""
    queue: tuple[dict[str, Any], ...] = ()
    gpus: tuple[dict[str, Any], ...] = ()
    lines: tuple[Line, ...] = ()
    """Oldest first."""
    away_since: float | None = None
    """time.monotonic() of the first try that failed; None: the server answers."""
    away_why: str = ""
    looked: bool = False
    """Something has been heard of the server."""
    error: Exception | None = field(default=None, repr=False)
    """Why looking has ended."""

    def listed(self) -> list[str]:
        """Ids of the jobs that a list of all shows, from above."""
        rows = [str(row["job"]) for row in self.queue if row["job"]]
        return list(dict.fromkeys([*(one.job.id for one in self.jobs), *rows, *(job.id for job in self.ended)]))

    def names(self) -> dict[str, str]:
        """Names of the jobs that have one, by id."""
        found = {str(row["job"]): str(row["name"]) for row in self.queue if row["job"] and row["name"]}
        for job in (*self.ended, *(one.job for one in self.jobs)):
            if job.name:
                found[job.id] = job.name
        return found

    @property
    def over(self) -> Job | None:
        """The one job, once it has ended."""
        if self.one is None or not self.jobs or not self.jobs[0].job.finished:
            return None
        return self.jobs[0].job
