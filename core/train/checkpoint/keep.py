"""Which checkpoints of a run folder are kept. A pure function of their names, times and evaluations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Written:
    """A complete checkpoint."""

    name: str
    step: int
    at: float
    """When it was written, in seconds since 1970."""


def kept(
    found: Sequence[Written], last: int, best_steps: Iterable[int] = (), best: int = 0, hourly: int = 0
) -> set[str]:
    """Names of the checkpoints that stay, of `found`, which are the furthest first.

    `last`: that many of the furthest. `best`: that many whose steps come first in `best_steps`, the steps of all
    evaluations from the best to the worst. `hourly`: the furthest of each of that many hours that have one, the latest
    hours first.
    """
    names = {one.name for one in found[:last]}
    at_step: dict[int, str] = {}
    for one in found:
        at_step.setdefault(one.step, one.name)
    names |= set([at_step[step] for step in best_steps if step in at_step][:best])
    hours: dict[int, str] = {}
    for one in found:
        hours.setdefault(int(one.at // HOUR), one.name)
    return names | {hours[hour] for hour in sorted(hours, reverse=True)[:hourly]}
