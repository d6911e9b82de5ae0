"""What the scheduler is held against: schedules of the same week by simpler rules, and by rules that know the future.

`fifo`: jobs start in the order in which they came, and whoever does not fit holds up all others: what a lab has that
shares a box by a list.

`first_fit`: as they came, but whoever fits goes ahead. Wide jobs may starve.

`oracle`: knows how long each job will take. At every arrival and end it lets those run that have the least GPU seconds
left, as many as fit in that order; it stops and moves jobs at no cost. Shortest remaining work first is optimal for the
mean on one machine, and the usual yardstick on several; with wide jobs it is no optimum.

`bound`: no schedule has a smaller mean time from submit to end. Let a job use any number of GPUs, or a part of one, at
the same GPU seconds: all GPUs are one machine, and there shortest remaining work first is optimal (Schrage 1968). What
a real schedule can do, this one can.

`fair`: the ideal of fair share: at each moment all owners who have anything get the same share of the GPUs, what one
cannot use goes to the others (max-min), and each owner's go to their jobs in the order in which they came, a part of a
GPU being as good as a GPU. It knows nothing of the future, and no box can do it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.lab.week import Task

EPSILON = 1e-6


@dataclass(slots=True)
class Outcome:
    """What became of a task."""

    task: Task
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When it held its GPUs, from and to; seconds from the beginning of the week."""

    @property
    def end(self) -> float:
        return self.spans[-1][1]

    @property
    def wait(self) -> float:
        """Seconds in which it was there and did not run."""
        return max(0.0, self.end - self.task.submit - sum(to - since for since, to in self.spans))


def fifo(tasks: Sequence[Task], gpus: int) -> list[Outcome]:
    return _in_order(tasks, gpus, blocking=True)


def first_fit(tasks: Sequence[Task], gpus: int) -> list[Outcome]:
    return _in_order(tasks, gpus, blocking=False)


def _in_order(tasks: Sequence[Task], gpus: int, *, blocking: bool) -> list[Outcome]:
    """Nobody is stopped."""
    outcomes = {task.name: Outcome(task) for task in tasks}
    coming, waiting = sorted(tasks, key=lambda task: task.submit), list[Task]()
    ends: list[tuple[float, int]] = []
    free, at, now = gpus, 0, 0.0
    while at < len(coming) or waiting or ends:
        moments = [end for end, _ in ends] + ([coming[at].submit] if at < len(coming) else [])
        now = min(moments)
        free += sum(width for end, width in ends if end <= now)
        ends = [(end, width) for end, width in ends if end > now]
        while at < len(coming) and coming[at].submit <= now:
            waiting.append(coming[at])
            at += 1
        left = []
        for number, task in enumerate(waiting):
            if task.gpus <= free:
                free -= task.gpus
                outcomes[task.name].spans.append((now, now + task.seconds))
                ends.append((now + task.seconds, task.gpus))
                continue
            left.append(task)
            if blocking:
                left += waiting[number + 1 :]
                break
        waiting = left
    return list(outcomes.values())


def oracle(tasks: Sequence[Task], gpus: int) -> list[Outcome]:
    outcomes = {task.name: Outcome(task) for task in tasks}

    def chosen(active: Sequence[Task], left: dict[str, float]) -> dict[str, float]:
        free, rates = float(gpus), {}
        for task in sorted(active, key=lambda task: (left[task.name], task.submit)):
            if task.gpus <= free:
                free -= task.gpus
                rates[task.name] = float(task.gpus)
        return rates

    def told(name: str, since: float, to: float) -> None:
        spans = outcomes[name].spans
        if spans and spans[-1][1] >= since - EPSILON:
            spans[-1] = (spans[-1][0], to)
        else:
            spans.append((since, to))

    _flow(tasks, chosen, told)
    return list(outcomes.values())


def bound(tasks: Sequence[Task], gpus: int) -> dict[str, float]:
    """Name → when it ends."""

    def chosen(active: Sequence[Task], left: dict[str, float]) -> dict[str, float]:
        first = min(active, key=lambda task: (left[task.name], task.submit))
        return {first.name: float(gpus)}

    return _flow(tasks, chosen)


def fair(tasks: Sequence[Task], gpus: int) -> dict[str, float]:
    """Name → when it ends."""

    def chosen(active: Sequence[Task], left: dict[str, float]) -> dict[str, float]:
        mine: dict[str, list[Task]] = {}
        for task in active:  # in the order in which they came
            mine.setdefault(task.owner, []).append(task)
        shares = _max_min({owner: float(sum(task.gpus for task in own)) for owner, own in mine.items()}, float(gpus))
        rates: dict[str, float] = {}
        for owner, own in mine.items():
            share = shares[owner]
            for task in own:
                rates[task.name] = min(share, float(task.gpus))
                share -= rates[task.name]
        return rates

    return _flow(tasks, chosen)


def _max_min(wishes: dict[str, float], there: float) -> dict[str, float]:
    """The same for everybody, and what one does not want to the others."""
    shares: dict[str, float] = {}
    by_size = sorted(wishes, key=lambda owner: (wishes[owner], owner))
    for number, owner in enumerate(by_size):
        shares[owner] = min(wishes[owner], there / (len(by_size) - number))
        there -= shares[owner]
    return shares


def _flow(
    tasks: Sequence[Task],
    chosen: Callable[[Sequence[Task], dict[str, float]], dict[str, float]],
    told: Callable[[str, float, float], None] = lambda name, since, to: None,
) -> dict[str, float]:
    """Let work flow at the rates that `chosen` gives at every arrival and end. Name → when it ends."""
    coming = sorted(tasks, key=lambda task: task.submit)
    left = {task.name: task.work for task in tasks}
    active: list[Task] = []
    ends: dict[str, float] = {}
    at, now = 0, 0.0
    while at < len(coming) or active:
        if not active:
            now = max(now, coming[at].submit)
        while at < len(coming) and coming[at].submit <= now:
            active.append(coming[at])
            at += 1
        rates = {name: rate for name, rate in chosen(active, left).items() if rate > EPSILON}
        then = min(now + left[name] / rate for name, rate in rates.items())
        if at < len(coming):
            then = min(then, coming[at].submit)
        for name, rate in rates.items():
            left[name] -= rate * (then - now)
            told(name, now, then)
        now = then
        for task in [task for task in active if left[task.name] <= EPSILON * max(1.0, task.gpus)]:
            ends[task.name] = now
            active.remove(task)
    return ends
