"""Fair share: who has used how much, each second counted by its age.

A second of a GPU that was used t ago counts 2^(-t / half-life) (Slurm: PriorityDecayHalfLife). What an owner's running
jobs have used counts at once, each of them as SLICE_SECONDS at the least: owners with equal usage take turns on an idle
box instead of one of them getting all of it. Pure arithmetic; core/jobs/policies/usage.py keeps the books.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

HALF_LIFE_SECONDS = 7 * 86_400.0
SLICE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Booked:
    """Usage of an owner in a project that is charged already: `billed` seconds as they counted at `at`."""

    owner_id: str
    project_id: str
    billed: float
    at: float


@dataclass(frozen=True, slots=True)
class UsageSpan:
    """A slot's time that is not charged yet."""

    owner_id: str
    project_id: str
    began: float
    ended: float | None
    """None: it is still held."""
    billing: float
    gpus: int
    attempt: tuple[str, int] = ("", 0)
    """(job, number) of what held it: a job of several slots has a span of each."""
    part: float = 1.0
    """What of the slot it is: less than all where sessions share a process."""
    since: float | None = None
    """When what held it began, where this span is not its first one."""


@dataclass(frozen=True, slots=True)
class GuestSpan:
    """The time for which a session was in the process of another one, which had the slot."""

    owner_id: str
    project_id: str
    attempt: tuple[str, int]
    began: float
    ended: float | None
    """None: it is still there."""


def shared_out(span: UsageSpan, guests: Sequence[GuestSpan]) -> Iterator[UsageSpan]:
    """A slot's time as those count it who shared it, each moment in equal parts: the sum is that of the slot. A guest
    that is there before or after the slot was held counts for the time of the slot."""
    end = math.inf if span.ended is None else span.ended
    moments = {span.began, end}
    for guest in guests:
        moments |= {guest.began, end if guest.ended is None else guest.ended}
    times = sorted(moment for moment in moments if span.began <= moment <= end)
    for began, until in itertools.pairwise(times):
        there = [one for one in guests if one.began <= began and (one.ended is None or one.ended >= until)]
        ended = None if until == math.inf else until
        mine = replace(span, began=began, ended=ended, part=1 / (1 + len(there)), since=span.began)
        yield mine
        for one in there:
            since = max(one.began, span.began)
            yield replace(mine, owner_id=one.owner_id, project_id=one.project_id, attempt=one.attempt, since=since)


def faded(seconds: float, age: float, half_life: float) -> float:
    """What `seconds` of use that are `age` seconds old count now."""
    return seconds * math.exp2(-max(0.0, age) / half_life)


def weighed(began: float, ended: float, now: float, half_life: float) -> float:
    """The seconds from `began` to `ended`, each counted by its age at `now`: the integral of 2^(-age / half_life)."""
    if ended <= began:
        return 0.0
    rate = math.log(2.0) / half_life
    return -math.expm1(-rate * (ended - began)) / rate * math.exp2(-max(0.0, now - ended) / half_life)


def effective(booked: Iterable[Booked], spans: Iterable[UsageSpan], now: float, half_life: float) -> dict[str, float]:
    """Billed seconds of every owner as they count at `now`."""
    usage: dict[str, float] = {}
    for row in booked:
        usage[row.owner_id] = usage.get(row.owner_id, 0.0) + faded(row.billed, now - row.at, half_life)
    for span in spans:
        seconds = weighed(span.began, now if span.ended is None else span.ended, now, half_life)
        if span.ended is None:
            before = 0.0 if span.since is None else span.began - span.since
            seconds = max(seconds, SLICE_SECONDS - before)
        usage[span.owner_id] = usage.get(span.owner_id, 0.0) + span.part * span.billing * seconds
    return usage
