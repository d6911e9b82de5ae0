"""Workers without children: what they claim from a database, for several that claim against one another."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError

from core.db.engine import Database
from core.db.tables import Job
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Slot
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.scheduling import cluster


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


def claim_and_keep(database: Database, node: str) -> str | None:
    """The one job that is claimed and not ended; None: there was none to be had."""
    with database.write() as session:
        claim = claims.claim(session, f"worker-{node}", node, Slot("GPU-0", "gpu"), 30)
    return None if claim is None else claim.token.job_id


def contend_for_gangs(database: Database, node: str) -> list[tuple[str, int]]:
    """One of several workers that claim for the same node: take what there is and end it, until no job is left. Each
    job won, and how many slots it had."""
    won = []
    while True:
        with database.read() as session:
            if session.execute(select(func.count()).where(Job.status != "succeeded")).scalar_one() == 0:
                return won
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
            won.append((claim.token.job_id, len(claim.slots)))
            with database.write() as session:
                finish(session, claim.token, claim.kind, Succeeded({"ok": True}), 0, RetryPolicy())
