"""A job under which one worker after the other vanishes: counted, reset by progress, given up at the limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import func, select, update

from core.db.engine import Database, db_now
from core.db.tables import Allocation, Event, Job, OutboxMessage
from core.jobs.lifecycle import claims, lease_expiry, relay
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.lease_expiry import LossPolicy
from core.jobs.lifecycle.submit import Actor, cancel, pause, retry

ADA = Actor("user-ada", "proj-lab")
POLICY = LossPolicy(max_losses=3, backoff_seconds=20)
CPU, PREPARE = Slot("cpu", "cpu"), Slot("prepare-0", "prepare")

Make = Callable[..., str]
Row = Callable[[str], Job]


def won(database: Database, slot: Slot = CPU) -> Claim:
    with database.write() as session:
        session.execute(update(Job).values(not_before=None))
        claim = claims.claim(session, "worker-a", "box", slot, 60)
    assert claim is not None
    return claim


def vanish(database: Database) -> int:
    """The lease of whatever runs is over."""
    with database.write() as session:
        session.execute(update(Job).where(Job.lease_until.is_not(None)).values(lease_until=db_now() - 1))
    with database.write() as session:
        return len(lease_expiry.reap(session, POLICY))


def checkpoint(database: Database, claim: Claim, step: int, *, of: int | None = None) -> None:
    line = {"seq": 1, "time": 1.0, "type": "checkpoint", "step": step, "micro_step": 0, "path": "checkpoints/x"}
    with database.write() as session:
        assert relay.relay(session, claim.token, relay.EventBatch(10, [line]), of=of)


@pytest.mark.parametrize("slot", [CPU, PREPARE], ids=lambda slot: slot.kind)
def test_it_is_given_up_in_words_at_the_limit(database: Database, make_job: Make, row: Row, slot: Slot) -> None:
    job_id = make_job(prepared=slot is CPU)
    for wait in (None, 20, 40):  # the first time is nobody's fault
        won(database, slot)
        before = database.now()
        assert vanish(database) == 1
        job, after = row(job_id), database.now()
        assert (job.status, job.machine_failures) == ("queued", 0)
        assert job.not_before is None if wait is None else before <= job.not_before - wait <= after
    won(database, slot)
    vanish(database)
    job = row(job_id)
    assert job.status == "failed" and job.failure is not None
    assert (job.failure["class"], job.failure["code"]) == ("machine", "worker_lost")
    assert "4 workers in a row" in job.failure["message"] and "`retry`" in job.failure["message"]
    with database.read() as session:
        held = session.execute(select(func.count()).where(Allocation.released_at.is_(None))).scalar_one()
        told = session.execute(select(Event.data).order_by(Event.seq.desc()).limit(1)).scalar_one()
    assert held == 0
    assert (told["to"], told["actor"], told["failure"]["code"]) == ("failed", "eft", "worker_lost")
    with database.write() as session:
        assert retry(session, ADA, job_id).losses == 0


def test_a_further_checkpoint_resets_the_count_and_an_old_one_does_not(
    database: Database, make_job: Make, row: Row
) -> None:
    job_id = make_job()
    for attempt in range(1, 3 * POLICY.max_losses):
        claim = won(database)
        if attempt > 1 and attempt % 2:  # told by the attempt after it, since its worker could not
            checkpoint(database, claim, 10 * (attempt - 1), of=attempt - 1)
        elif attempt > 1:
            checkpoint(database, claim, 10 * (attempt - 1))
        assert row(job_id).losses == 0
        vanish(database)
        assert (row(job_id).status, row(job_id).losses) == ("queued", 1)
    furthest = row(job_id).furthest_step
    for losses in range(2, POLICY.max_losses + 1):
        claim = won(database)
        checkpoint(database, claim, furthest)  # the same again: it gets no further
        vanish(database)
        assert (row(job_id).status, row(job_id).losses) == ("queued", losses)
    won(database)
    vanish(database)
    assert row(job_id).status == "failed"


def test_a_model_that_is_ready_is_progress(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job(prepared=False)
    won(database, PREPARE)
    vanish(database)
    claim = won(database, PREPARE)
    with database.write() as session:
        finish(session, claim.token, "prepare", Succeeded({"model_dir": "m"}), 0, RetryPolicy())
    assert row(job_id).losses == 0


def test_leaving_in_good_order_is_no_loss(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    for _ in range(2 * POLICY.max_losses):
        claim = won(database)
        with database.write() as session:
            finish(session, claim.token, "train", Requeued("worker on box is leaving"), 75, RetryPolicy())
    assert (row(job_id).status, row(job_id).losses) == ("queued", 0)


@pytest.mark.parametrize(("wish", "end"), [(pause, "paused"), (cancel, "cancelled")])
def test_its_owners_wish_comes_before_the_limit(
    database: Database, make_job: Make, row: Row, wish: Callable[..., Job], end: str
) -> None:
    job_id = make_job()
    won(database)
    with database.write() as session:
        session.execute(update(Job).values(losses=POLICY.max_losses))
        wish(session, ADA, job_id)
    vanish(database)
    assert row(job_id).status == end


# -- the reaper's own four


def test_the_reaper_takes_what_has_expired_and_nothing_else(database: Database, make_job: Make, row: Row) -> None:
    expired, leased, waiting = make_job(), make_job(), make_job()
    with database.write() as session:
        assert claims.claim(session, "worker-a", "box", CPU, 0.05) is not None
        assert claims.claim(session, "worker-a", "box", Slot("cpu-1", "cpu"), 60) is not None
    time.sleep(0.1)
    with database.write() as session:
        assert lease_expiry.reap(session, POLICY) == [(expired, 1)]
    assert [row(job_id).status for job_id in (expired, leased, waiting)] == ["queued", "starting", "queued"]


def test_reapers_and_a_renewal_at_once(database: Database, make_job: Make, row: Row) -> None:
    """Either the renewal came first and the lease holds, or the reaper did and the renewal is told so; never both."""
    jobs = [make_job() for _ in range(12)]
    held = []
    for number in range(12):
        with database.write() as session:
            claim = claims.claim(session, "worker-a", "box", Slot(f"cpu-{number}", "cpu"), 60)
            assert claim is not None
            held.append(claim)
    with database.write() as session:
        session.execute(update(Job).values(lease_until=db_now() - 1))
    barrier = Barrier(3)

    def renew() -> list[bool]:
        barrier.wait()
        kept = []
        for claim in held:
            with database.write() as session:
                kept.append(claims.renew(session, claim.token, 60) is not None)
        return kept

    def reap() -> list[tuple[str, int]]:
        barrier.wait()
        taken = []
        for _ in range(3):
            with database.write() as session:
                taken += lease_expiry.reap(session, POLICY)
        return taken

    with ThreadPoolExecutor(3) as pool:
        renewing, one, other = pool.submit(renew), pool.submit(reap), pool.submit(reap)
        kept, taken = renewing.result(250), one.result(250) + other.result(250)
    assert len(taken) == len(set(taken)), "each lease is taken back once"
    kept_jobs = {claim.token.job_id for claim, holds in zip(held, kept, strict=True) if holds}
    assert kept_jobs.isdisjoint(job_id for job_id, _ in taken)
    assert kept_jobs | {job_id for job_id, _ in taken} == set(jobs)
    assert {row(job_id).status for job_id in kept_jobs} <= {"starting"}
    with database.read() as session:
        rings = session.execute(select(func.count()).select_from(OutboxMessage)).scalar_one()
    assert rings == len(jobs) + len(taken)
