"""What a schedule of a week was worth: use of the GPUs, waits, fairness. All from the outcomes, whoever made them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.lab.peers import Outcome

SHORT = 600.0
"""Slowdowns count shorter jobs as if they took that long (Feitelson's bounded slowdown): ten minutes of waiting for a
job of one second is no disaster of 600."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Of one owner's jobs. Seconds."""

    jobs: int
    gpu_hours: float
    median_wait: float
    p95_wait: float
    slowdown: float
    """Mean of (end - submit) / run time, bounded."""
    against_fair: float
    """Mean time from submit to end over the same in the ideal of fair share: 1 is what one's share gives."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a schedule."""

    utilisation: float
    """GPU seconds given within the week over those that there were."""
    idle_while_waiting: float
    """GPU seconds in which a GPU idled although somebody waited, over all GPU seconds of such moments."""
    mean_wait: float
    median_wait: float
    p95_wait: float
    longest_wait: float
    mean_turnaround: float
    """From submit to end."""
    mean_slowdown: float
    fairness: float
    """Jain's index (1984) over owners of `against_fair`: 1 when all are served alike by their shares, 1/n if one is."""
    stopped: int
    """Times that a job was made to leave before its end."""
    makespan: float
    owners: Mapping[str, Owner]


def measure(outcomes: Sequence[Outcome], gpus: int, length: float, fair_ends: Mapping[str, float]) -> Figures:
    """`length`: of the week in seconds; `fair_ends`: bench.lab.peers.fair of the same tasks."""
    waits = [one.wait for one in outcomes]
    by_owner: dict[str, list[Outcome]] = {}
    for one in outcomes:
        by_owner.setdefault(one.task.owner, []).append(one)
    owners = {owner: _owner(own, fair_ends) for owner, own in sorted(by_owner.items())}
    return Figures(
        utilisation=sum(_within(one, length) * one.task.gpus for one in outcomes) / (gpus * length),
        idle_while_waiting=_idle_while_waiting(outcomes, gpus),
        mean_wait=statistics.fmean(waits),
        median_wait=statistics.median(waits),
        p95_wait=percentile(waits, 0.95),
        longest_wait=max(waits),
        mean_turnaround=statistics.fmean(one.end - one.task.submit for one in outcomes),
        mean_slowdown=statistics.fmean(map(slowdown, outcomes)),
        fairness=jain([owner.against_fair for owner in owners.values()]),
        stopped=sum(len(one.spans) - 1 for one in outcomes),
        makespan=max(one.end for one in outcomes),
        owners=owners,
    )


def _owner(own: Sequence[Outcome], fair_ends: Mapping[str, float]) -> Owner:
    waits = [one.wait for one in own]
    took = statistics.fmean(one.end - one.task.submit for one in own)
    ideal = statistics.fmean(fair_ends[one.task.name] - one.task.submit for one in own)
    return Owner(
        jobs=len(own),
        gpu_hours=sum(one.task.work for one in own) / 3600,
        median_wait=statistics.median(waits),
        p95_wait=percentile(waits, 0.95),
        slowdown=statistics.fmean(map(slowdown, own)),
        against_fair=took / ideal,
    )


def slowdown(one: Outcome) -> float:
    return max(1.0, (one.end - one.task.submit) / max(one.task.seconds, SHORT))


def jain(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def percentile(values: Sequence[float], share: float) -> float:
    """By rank: the smallest value that so many are not above."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -int(-share * len(ranked) // 1) - 1))]


def _within(one: Outcome, length: float) -> float:
    return sum(max(0.0, min(to, length) - since) for since, to in one.spans)


def _idle_while_waiting(outcomes: Sequence[Outcome], gpus: int) -> float:
    """Between two changes of anything, nothing changes."""
    steps: list[tuple[float, int, int]] = []
    for one in outcomes:
        edge = one.task.submit
        for since, to in one.spans:
            steps += [(edge, 0, 1), (since, 0, -1), (since, one.task.gpus, 0), (to, -one.task.gpus, 0)]
            edge = to
    idle = there = 0.0
    busy = waiting = 0
    before = 0.0
    for at, gpus_more, waiting_more in sorted(steps):
        if waiting > 0:
            there += gpus * (at - before)
            idle += (gpus - busy) * (at - before)
        busy, waiting, before = busy + gpus_more, waiting + waiting_more, at
    return idle / there if there else 0.0
