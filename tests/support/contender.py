"""A worker without children: claims and finishes what it can, prints what it won; with COUNT, it claims so many and
keeps them. `python -m tests.support.contender URL NODE [COUNT]`."""

from __future__ import annotations

import sys

from core.db.engine import Database
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Slot
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish


def contend(database: Database, worker: str, node: str, slot: Slot) -> list[tuple[str, int]]:
    """Claim, run, finish until nothing is left; (job, attempt) of each claim won."""
    won = []
    while True:
        with database.write() as session:
            claim = claims.claim(session, worker, node, slot, 30)
        if claim is None:
            return won
        won.append((claim.token.job_id, claim.token.attempt))
        with database.write() as session:
            claims.running(session, claim.token)
        with database.write() as session:
            after = finish(session, claim.token, claim.kind, Succeeded({"ok": True}), 0, RetryPolicy())
        assert after in (Status.SUCCEEDED, Status.QUEUED)


if __name__ == "__main__":
    url, node = sys.argv[1:3]
    database = Database(url)
    if len(sys.argv) > 3:
        for number in range(int(sys.argv[3])):
            with database.write() as session:
                claim = claims.claim(session, f"worker-{node}", node, Slot(f"GPU-{number}", "gpu"), 30)
            if claim is not None:
                print(claim.token.job_id, claim.token.attempt)
        sys.exit()
    for job_id, attempt in contend(database, f"worker-{node}", node, Slot("cpu", "cpu")):
        print(job_id, attempt)
    database.dispose()
