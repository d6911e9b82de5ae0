"""About when a waiting job will start: by the steps that running jobs have left, time limits, and what jobs of the same
project have taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.db.tables import Job
from core.jobs.base.slots import Key, Needs
from core.jobs.base.states import Status
from core.jobs.kinds import Kind
from core.jobs.scheduling import gang_scheduling, runtime_estimates
from core.jobs.scheduling.cluster import SlotState

RECENT = 20
"""Finished jobs of a project whose median time stands for a job of it that says nothing of its own."""


@dataclass(frozen=True, slots=True)
class EstimatedStart:
    """About when and where a waiting job starts."""

    at: float
    """Unix seconds."""
    seats: tuple[int, ...]
    """Places in the forecast's `seats`."""


class Forecast:
    """Estimates starts from one reading of the whole state: `seats`, and the jobs that run on them by their id."""

    def __init__(
        self,
        session: Session,
        now: float,
        seats: Sequence[SlotState],
        running: Mapping[str, Job],
        leave_seconds: float,
    ) -> None:
        self._session, self._now, self._seats, self._leave = session, now, seats, leave_seconds
        self._free_at = self._when_free(running)

    def starts(self, in_line: Sequence[Job]) -> dict[str, EstimatedStart]:
        """About when and where each of those that wait to be trained will start, by its id, if every slot goes on to
        the next as soon as it can."""
        free_at: dict[int, float | None] = {
            number: max(at, self._now)
            for number, at in self._free_at.items()
            if at is not None and self._seats[number].slot.phase == Kind.TRAIN
        }
        gaps: dict[int, tuple[float, float]] = {}
        starts: dict[str, EstimatedStart] = {}
        for row in in_line:
            needs = Key.parse(row.queue_key).needs
            gap = self._gap(row, needs, gaps) if needs.gpus == 1 else None
            if gap is not None and row.bound_seconds is not None:
                free, end = gaps.pop(gap)
                starts[row.id] = EstimatedStart(free, (gap,))
                gaps[gap] = free + row.bound_seconds + self._leave, end
                continue
            group = gang_scheduling.gather(self._seats, free_at, needs, stay=row.reserved_node)
            if group is None or group.start is None:
                continue
            starts[row.id], takes = EstimatedStart(group.start, tuple(group.seats)), self._takes(row)
            for number in group.seats:
                if (at := free_at.pop(number)) is not None and at < group.start:
                    gaps[number] = at, group.start
                if takes is not None:
                    free_at[number] = group.start + takes
        return starts

    def _gap(self, row: Job, needs: Needs, gaps: Mapping[int, tuple[float, float]]) -> int | None:
        """The seat where it is over before a job of several takes it."""
        if row.bound_seconds is None:
            return None
        takes = row.bound_seconds + self._leave
        fitting = [
            (began, number)
            for number, (began, end) in gaps.items()
            if began + takes <= end and not needs.missing(self._seats[number].slot)
        ]
        return min(fitting)[1] if fitting else None

    def _takes(self, row: Job) -> float | None:
        """Seconds that a waiting job will need of its slot."""
        left = (row.progress or {}).get("seconds_left")
        if row.attempt > 1 and left is not None:
            return float(left)
        limit = row.spec["resources"].get("max_runtime_seconds")
        typical = self._typical(row.project_id)
        return typical if limit is None else float(limit) if typical is None else min(float(limit), typical)

    def _typical(self, project_id: str) -> float | None:
        rows = self._session.execute(
            select(Job.finished_at - Job.started_at)
            .where(Job.project_id == project_id, Job.status == Status.SUCCEEDED.value, Job.kind == "train")
            .order_by(Job.id.desc())
            .limit(RECENT)
        )
        took = [float(seconds) for (seconds,) in rows if seconds is not None]
        return median(took) if took else None

    def _when_free(self, jobs: Mapping[str, Job]) -> dict[int, float | None]:
        """By the place in `_seats`; None: unknown."""
        to_go = runtime_estimates.of_running(self._session, list(jobs.values()), self._now)
        times: dict[int, float | None] = {}
        for number, seat in enumerate(self._seats):
            running = jobs.get(seat.busy) if seat.busy is not None else None
            at: float | None = self._now
            if running is not None:
                left = 0.0 if runtime_estimates.leaves(running) else to_go[running.id].expected
                left = self._typical(running.project_id) if left is None else left
                at = None if left is None else self._now + left
            if seat.closed is not None:
                at = None if at is None or seat.opens_at is None else max(at, seat.opens_at)
            times[number] = at
        return times
