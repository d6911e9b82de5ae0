"""What a seed does: the same actions, at the same moments, with the same delays. Whom they meet is the run's affair.

An action names no job and no process, since which ones there are depends on the machine's mood; its `pick` in [0, 1)
chooses among those that are there when its moment comes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

FAULTS = {
    "kill_trainer": 5,
    "kill_rank": 2,
    "kill_worker": 4,
    "freeze_worker": 3,
    "freeze_launcher": 2,
    "kill_api": 3,
    "kill_database": 3,
    "kill_broker": 2,
    "flushall": 2,
    "term_worker": 2,
    "kill_everything": 1,
}
"""Kind → how often it comes in each deck. A deck is dealt in random order before the next one is shuffled."""
WISHES = {"submit": 9, "submit_and_leave": 1, "pause": 3, "resume": 3, "cancel": 2, "retry": 2}
SHARING = {"hold": 3, "release": 2, "drain_gpu": 1, "drain_node": 2, "undrain_node": 1, "quota": 2, "urgent": 5}
"""What people do to one another: slots and nodes that are taken away and given back, quotas, jobs of a higher
priority."""

SHORT_SECONDS = 60.0
"""A storm that is over sooner does without what outlasts it: a gang whose launcher stands still."""

Databases = Literal["sqlite", "postgres"]


@dataclass(frozen=True, slots=True)
class Action:
    at: float
    """Seconds after the start."""
    kind: str
    pick: float
    """In [0, 1): which of those that are there."""
    seconds: float
    """Before what was ended is started again; of a freeze: its length beyond the lease."""


def write(
    seed: int,
    seconds: float,
    database: Databases,
    *,
    fault_every: float,
    wish_every: float,
    share_every: float,
    burst: int,
) -> list[Action]:
    """The script of a seed, in its order: `burst` submits at once, then wishes, faults and SHARING at mean distances in
    seconds.

    The first deck of faults, and of SHARING, holds each kind once, so that a short run meets as many as it has time
    for.
    """
    dice = random.Random(seed)
    faults = dict(FAULTS)
    if database == "sqlite":
        del faults["kill_database"]  # it is no process
    if seconds < SHORT_SECONDS:
        del faults["freeze_launcher"]
    actions = [Action(0.0, "submit", dice.random(), 0.0) for _ in range(burst)]
    actions += _stream(dice, seconds, wish_every, [list(chain(*(repeat(k, n) for k, n in WISHES.items())))])
    decks = [list(faults), list(chain(*(repeat(kind, count) for kind, count in faults.items())))]
    actions += _stream(dice, seconds, fault_every, decks)
    decks = [list(SHARING), list(chain(*(repeat(kind, count) for kind, count in SHARING.items())))]
    actions += _stream(dice, seconds, share_every, decks)
    return sorted(actions, key=lambda action: action.at)


def _stream(dice: random.Random, seconds: float, every: float, decks: list[list[str]]) -> list[Action]:
    """Actions at even distances with some jitter; the last of `decks` is dealt again and again."""
    found: list[Action] = []
    left: list[str] = []
    dealt = 0
    at = every * dice.uniform(0.5, 1.5)
    while at < seconds:
        if not left:
            left = list(decks[min(dealt, len(decks) - 1)])
            dice.shuffle(left)
            dealt += 1
        found.append(Action(at, left.pop(), dice.random(), dice.uniform(0.1, 4.0)))
        at += every * dice.uniform(0.5, 1.5)
    return found
