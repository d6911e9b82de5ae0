"""One of several workers that claim for the same node: `python -m tests.support.gang_contender URL NODE` takes what
there is, ends it, and prints each job with its slots until no job is left."""

from __future__ import annotations

import sys

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from core.db.engine import Database
from core.db.tables import Job
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.scheduling import cluster


def main() -> None:
    url, node = sys.argv[1:3]
    database = Database(url)
    while True:
        with database.read() as session:
            if session.execute(select(func.count()).where(Job.status != "succeeded")).scalar_one() == 0:
                break
            seats = [seat for seat in cluster.slot_states(session, database.now(), 600.0) if seat.node == node]
        free = [seat.slot for seat in seats if seat.free]
        claim = None
        for slot in free:
            try:
                with database.write() as session:
                    claim = claims.claim(session, f"worker-of-{node}", node, slot, 60, beside=free)
            except IntegrityError:
                continue  # another has taken this very slot since: the index is the mutex
            if claim is not None:
                break
        if claim is not None:
            print(claim.token.job_id, *(slot.id for slot in claim.slots), flush=True)
            with database.write() as session:
                finish(session, claim.token, claim.kind, Succeeded({"ok": True}), 0, RetryPolicy())
    database.dispose()


if __name__ == "__main__":
    main()
