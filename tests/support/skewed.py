"""A node whose clock is wrong, in a process of its own: everything that Python calls the time is shifted there. (SQLite
asks the kernel itself; it has one host, and so one clock.)
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from core.db.engine import Database
from core.jobs.lifecycle import claims, leader, lease_expiry
from core.jobs.lifecycle.claims import Slot
from core.jobs.lifecycle.lease_expiry import LossPolicy
from tests.support.at_once import at_once


def answers(database: Database, skew: float, node: str, does: Sequence[str]) -> list[str]:
    """What the node answers whose clock is wrong by `skew` seconds: `claim`, `reap` or `lead`, each with its answer."""

    def run(own: Database) -> list[str]:
        _shift(skew)
        return [f"{what} {_answer(own, node, what)}" for what in does]

    return at_once(database, run)[0]


def _shift(seconds: float) -> None:
    """In a fork that ends with it. Nothing of ours has another name for these functions."""
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


def _answer(database: Database, node: str, what: str) -> object:
    match what:
        case "claim":
            with database.write() as session:
                claim = claims.claim(session, f"worker-{node}", node, Slot("cpu", "cpu"), 60)
            return None if claim is None else claim.token.job_id
        case "reap":
            with database.write() as session:
                return len(lease_expiry.reap(session, LossPolicy()))
        case "lead":
            return leader.lead(database, "housekeeping", node, 60)
        case _:
            raise ValueError(what)
