"""Which runs of a sweep stop early: a pure decision over what the runs have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.jobs.base.states import FINAL, Status
from core.spec.sweep import Halving


@dataclass(frozen=True, slots=True)
class SweepRun:
    """A run as far as comparisons depend on it."""

    job_id: str
    status: Status
    values: Mapping[int, float]
    """Step to the value of the metric."""


@dataclass(frozen=True, slots=True)
class RungComparison:
    """All runs at one step."""

    step: int
    values: dict[str, float]
    kept: tuple[str, ...]
    stopped: tuple[str, ...]
    """Best first, as `kept`."""


@dataclass(slots=True)
class NextMove:
    """What follows from what the runs have measured."""

    comparison: RungComparison | None = None
    """The next one, once every run has come to its step or has ended before it."""
    arrived: list[str] = field(default_factory=list)
    """Runs that have come to the step and wait there for the others."""
    missing: list[str] = field(default_factory=list)
    """Runs that the comparison waits for."""


def next_move(halving: Halving, goal: str, runs: Sequence[SweepRun], made: int, stopped: set[str]) -> NextMove:
    """The comparison after `made` ones, in which the runs in `stopped` ended.

    Runs with the same value keep their order. A run that ended before the step, in whatever way, takes no part.
    """
    if made == len(halving.steps):
        return NextMove()
    step = halving.steps[made]
    live = [run for run in runs if run.job_id not in stopped]
    there = {run.job_id: run.values[step] for run in live if step in run.values}
    missing = [run.job_id for run in live if run.job_id not in there and run.status not in FINAL]
    if missing or not there:
        return NextMove(arrived=list(there), missing=missing)

    def rank(job_id: str) -> tuple[bool, float]:
        value = there[job_id]
        return value != value, value if goal == "min" else -value  # what is not a number comes last

    order = sorted(there, key=rank)
    kept = halving.kept(len(order))
    return NextMove(RungComparison(step, there, tuple(order[:kept]), tuple(order[kept:])), list(there))
