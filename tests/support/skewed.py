"""A node whose clock is wrong: `python -m tests.support.skewed SECONDS URL NODE DOES…`, each printed with its answer.

Everything that Python calls the time is shifted before anything of ours is imported. (SQLite asks the kernel itself;
it has one host, and so one clock.)
"""

from __future__ import annotations

import sys
import time


def _shift(seconds: float) -> None:
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)


if __name__ == "__main__":
    _shift(float(sys.argv[1]))

    from core.db.engine import Database
    from core.jobs.lifecycle import claims, leader, lease_expiry
    from core.jobs.lifecycle.claims import Slot
    from core.jobs.lifecycle.lease_expiry import LossPolicy

    url, node, *does = sys.argv[2:]
    database = Database(url)
    for what in does:
        answer: object
        match what:
            case "claim":
                with database.write() as session:
                    claim = claims.claim(session, f"worker-{node}", node, Slot("cpu", "cpu"), 60)
                answer = None if claim is None else claim.token.job_id
            case "reap":
                with database.write() as session:
                    answer = len(lease_expiry.reap(session, LossPolicy()))
            case "lead":
                answer = leader.lead(database, "housekeeping", node, 60)
            case _:
                raise SystemExit(f"unknown: {what}")
        print(what, answer, flush=True)
    database.dispose()
