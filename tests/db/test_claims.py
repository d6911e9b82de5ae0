"""Claims and leases: eligible, unlocked, stale token, contention; the reaper; the mutex of a slot."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Barrier

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from core.db.engine import Database, db_now
from core.db.tables import Allocation, Attempt, Event, Job, OutboxMessage
from core.jobs.base.states import TRANSITIONS, Status
from core.jobs.lifecycle import claims, lease_expiry, relay, requeue
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.lease_expiry import LossPolicy
from core.jobs.lifecycle.submit import Actor, cancel
from tests.support.at_once import at_once
from tests.support.contender import contend

ADA = Actor("user-ada", "proj-lab")
CPU, GPU, PREPARE = Slot("cpu", "cpu"), Slot("GPU-1", "gpu"), Slot("prepare-0", "prepare")

Make = Callable[..., str]
Row = Callable[[str], Job]


def take(database: Database, slot: Slot = CPU, *, worker: str = "worker-a", lease: float = 60) -> Claim | None:
    with database.write() as session:
        return claims.claim(session, worker, f"node-{worker}", slot, lease)


def won(database: Database, slot: Slot = CPU, *, worker: str = "worker-a", lease: float = 60) -> Claim:
    claim = take(database, slot, worker=worker, lease=lease)
    assert claim is not None
    return claim


def end(database: Database, claim: Claim, outcome: Outcome, policy: RetryPolicy | None = None) -> Status | None:
    with database.write() as session:
        return finish(session, claim.token, claim.kind, outcome, 0, policy or RetryPolicy(backoff_seconds=60))


def reap(database: Database) -> int:
    with database.write() as session:
        return len(lease_expiry.reap(session, LossPolicy()))


# -- eligible


def test_oldest_first_and_what_a_slot_can_serve(database: Database, make_job: Make) -> None:
    unprepared, first = make_job(prepared=False), make_job()
    for_gpu, for_cpu = make_job(accelerator="gpu"), make_job(accelerator="cpu")
    assert won(database, PREPARE).token.job_id == unprepared
    assert won(database, GPU).token.job_id == first
    assert won(database, CPU).token.job_id == for_cpu
    assert take(database, Slot("GPU-2", "gpu")) is not None
    assert take(database, Slot("GPU-3", "gpu")) is None
    with database.read() as session:
        assert session.execute(select(Allocation.slot).where(Allocation.job_id == for_gpu)).scalar_one() == "GPU-2"


def test_a_retry_waits_its_time(database: Database, make_job: Make) -> None:
    job_id = make_job()
    with database.write() as session:
        session.execute(update(Job).values(not_before=db_now() + 600))
        assert claims.runnable(session) is None
    assert take(database) is None
    with database.write() as session:
        session.execute(update(Job).values(not_before=db_now() - 0.01))
    with database.read() as session:
        assert claims.runnable(session) == job_id
    assert won(database).token.job_id == job_id


@pytest.mark.parametrize("slot", [CPU, PREPARE], ids=lambda slot: slot.kind)
def test_a_claim_is_written_down(database: Database, make_job: Make, row: Row, slot: Slot) -> None:
    job_id = make_job(prepared=slot is not PREPARE)
    before = database.now()
    claim = won(database, slot)
    after = database.now()
    job = row(job_id)
    assert (job.status, job.attempt, job.worker, job.node) == (
        "preparing" if slot is PREPARE else "starting",
        1,
        "worker-a",
        "node-worker-a",
    )
    assert job.lease_until is not None and before <= job.lease_until - 60 <= after
    assert claim.kind == ("prepare" if slot is PREPARE else "train")
    with database.read() as session:
        attempt = session.execute(select(Attempt)).scalar_one()
        held = session.execute(select(Allocation)).scalar_one()
        events = session.execute(select(Event.data).order_by(Event.seq)).scalars().all()
    assert (attempt.kind, attempt.slot, attempt.ended_at) == (claim.kind, slot.id, None)
    assert (held.node, held.slot, held.released_at) == ("node-worker-a", slot.id, None)
    assert [event["to"] for event in events] == ["queued", job.status]


# -- unlocked


def test_a_leased_job_is_nobody_elses(database: Database, make_job: Make) -> None:
    make_job()
    won(database)
    assert take(database, worker="worker-b") is None
    assert reap(database) == 0


def test_an_expired_lease_is_taken_back(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    won(database, lease=0.05)
    time.sleep(0.1)
    assert reap(database) == 1
    assert reap(database) == 0
    job = row(job_id)
    assert (job.status, job.worker, job.lease_until, job.attempt) == ("queued", None, None, 1)
    assert "silent" in job.reason
    with database.read() as session:
        assert session.execute(select(func.count()).select_from(OutboxMessage)).scalar_one() == 2  # birth, and this
        assert session.execute(select(Allocation.released_at)).scalar_one() is not None
    assert won(database, worker="worker-b").token.attempt == 2


def test_an_expired_lease_of_a_job_that_was_to_stop_ends_it(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    won(database, lease=0.05)
    with database.write() as session:
        cancel(session, ADA, job_id)
    time.sleep(0.1)
    reap(database)
    assert row(job_id).status == "cancelled"


def test_renewing_keeps_the_lease_and_tells_of_a_stop(database: Database, make_job: Make) -> None:
    job_id = make_job()
    claim = won(database, lease=600)
    for _ in range(2):
        with database.write() as session:
            session.execute(update(Job).values(lease_until=Job.lease_until - 500))
            before = session.execute(select(Job.lease_until)).scalar_one()
            assert before is not None
        with database.write() as session:
            assert claims.renew(session, claim.token, 600) == ""
            after = session.execute(select(Job.lease_until)).scalar_one()
            assert after is not None and 500 <= after - before < 600
        assert reap(database) == 0
    with database.write() as session:
        cancel(session, ADA, job_id)
    with database.write() as session:
        assert claims.renew(session, claim.token, 600) == "cancel"
    with database.read() as session:
        assert claims.stop_requested(session, claim.token) == "cancel"


def test_the_partial_index_is_the_mutex_of_a_slot(database: Database, make_job: Make, row: Row) -> None:
    make_job()
    second = make_job()
    won(database)
    with pytest.raises(IntegrityError):
        take(database)  # the same node, the same slot
    assert row(second).status == "queued"


# -- stale token


def test_a_stale_token_writes_nothing(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    stale = won(database, lease=0.05)
    time.sleep(0.1)
    reap(database)
    fresh = won(database, worker="worker-b")
    before = row(job_id)

    line = {"seq": 1, "time": 1.0, "type": "metrics", "step": 1, "values": {"loss": 1.0}}
    with database.write() as session:
        assert claims.renew(session, stale.token, 60) is None
        assert claims.stop_requested(session, stale.token) is None
        assert claims.started(session, stale.token, 1, 1.0) is False
        claims.running(session, stale.token)
        assert relay.relay(session, stale.token, relay.EventBatch(10, [line])) is False
    outcomes: list[Outcome] = [Succeeded({}), Failed("user", "x", "y"), Requeued("z")]
    for outcome in outcomes:
        assert end(database, stale, outcome) is None

    after = row(job_id)
    columns = [column.key for column in Job.__table__.columns]
    assert {c: getattr(after, c) for c in columns} == {c: getattr(before, c) for c in columns}
    with database.write() as session:
        assert claims.renew(session, fresh.token, 60) == ""


# -- contention


def test_threads_never_share_a_job(database: Database, make_job: Make) -> None:
    jobs = {make_job() for _ in range(40)}
    barrier = Barrier(8)

    def work(number: int) -> list[tuple[str, int]]:
        barrier.wait()
        return contend(database, f"worker-{number}", "box", Slot(f"GPU-{number}", "gpu"))

    with ThreadPoolExecutor(8) as pool:
        claimed = [claim for won_here in pool.map(work, range(8)) for claim in won_here]
    assert Counter(claimed) == Counter((job_id, 1) for job_id in jobs)
    with database.read() as session:
        assert session.execute(select(func.count()).where(Job.status == "succeeded")).scalar_one() == 40
        assert session.execute(select(func.count()).where(Allocation.released_at.is_(None))).scalar_one() == 0


def test_processes_never_share_a_job(database: Database, make_job: Make) -> None:
    jobs = {make_job() for _ in range(60)}
    nodes = [f"node-{number}" for number in range(4)]
    workers = [partial(contend, worker=f"worker-{node}", node=node, slot=CPU) for node in nodes]
    won_by = at_once(database, *workers)
    assert Counter(claim for claimed in won_by for claim in claimed) == Counter((job_id, 1) for job_id in jobs)


def test_cancel_against_claim_and_finish(database: Database, make_job: Make, row: Row) -> None:
    """Whoever comes first: the history is a path of the table, and a cancelled job was never finished."""
    jobs = [make_job() for _ in range(20)]
    barrier = Barrier(2)

    def stop() -> None:
        barrier.wait()
        for job_id in jobs:
            with database.write() as session:
                try:
                    cancel(session, ADA, job_id)
                except Exception as error:
                    assert type(error).__name__ == "Conflict"

    def work() -> None:
        barrier.wait()
        while (claim := take(database)) is not None:
            end(database, claim, Succeeded({"ok": True}))

    with ThreadPoolExecutor(2) as pool:
        for future in (pool.submit(stop), pool.submit(work)):
            future.result()
    for job_id in jobs:
        assert row(job_id).status in ("cancelled", "succeeded")
        with database.read() as session:
            told = session.execute(
                select(Event.data).where(Event.job_id == job_id, Event.type == "status").order_by(Event.seq)
            ).scalars()
            path = [event["to"] for event in told]
        for one, following in pairwise(path):
            assert Status(following) in TRANSITIONS[Status(one)], path


# -- orphans


def test_what_an_earlier_worker_of_the_node_left(database: Database, make_job: Make) -> None:
    job_id = make_job()
    claim = won(database, worker="worker-a")
    with database.write() as session:
        claims.started(session, claim.token, 4711, 12.5)
    with database.read() as session:
        assert lease_expiry.orphans(session, "node-worker-a", "worker-a") == []
        ((job, attempt),) = lease_expiry.orphans(session, "node-worker-a", "worker-new")
    assert (job.id, attempt.pid, attempt.pid_started) == (job_id, 4711, 12.5)


# -- a claim that its worker did not hear of


def test_an_unheard_claim_is_handed_back_and_frees_its_slot(database: Database, make_job: Make, row: Row) -> None:
    """The database went away between the commit of a claim and its answer: job and slot are held by nobody."""
    unheard, waiting, elsewhere = make_job(), make_job(), make_job()
    won(database)  # and forgotten
    with pytest.raises(IntegrityError):
        take(database)
    heard = won(database, Slot("cpu-1", "cpu"))
    theirs = won(database, worker="worker-b")
    with database.write() as session:
        known = {(heard.token.job_id, heard.token.attempt)}
        assert requeue.requeue_unacknowledged(session, "worker-a", known) == [unheard]
    assert [row(job_id).status for job_id in (unheard, waiting, elsewhere)] == ["queued", "starting", "starting"]
    assert (heard.token.job_id, theirs.token.job_id) == (waiting, elsewhere)
    assert row(unheard).reason == "waits to continue: its worker did not learn that its claim had succeeded"
    again = won(database)
    assert (again.token.job_id, again.token.attempt) == (unheard, 2)
    with database.read() as session:
        assert session.execute(select(OutboxMessage.id).where(OutboxMessage.job_id == unheard)).all(), "nobody is rung"
