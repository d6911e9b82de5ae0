"""Every kind of claim (prepare, finish, outbox, leader): contention, stale tokens, and nodes with wrong clocks.

Claims of training jobs and of slots: test_claims.py; the reaper: test_lost.py; drains: test_drain.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Lock

from sqlalchemy import func, select, update

from core.db.engine import Database, db_now
from core.db.tables import Artifact, Event, Job, Leader, OutboxMessage
from core.jobs.base import outbox
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims, leader, lease_expiry
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Failed, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.lease_expiry import LossPolicy
from tests.support import skewed

Make = Callable[..., str]
Row = Callable[[str], Job]
CPU = Slot("cpu", "cpu")


def take(database: Database, node: str, slot: Slot) -> Claim | None:
    with database.write() as session:
        return claims.claim(session, f"worker-{node}", node, slot, 60)


# -- prepare


def test_two_never_prepare_one_job_and_a_stale_one_leaves_no_model_behind(
    database: Database, make_job: Make, row: Row
) -> None:
    jobs = {make_job(prepared=False) for _ in range(24)}
    barrier = Barrier(6)

    def work(number: int) -> list[Claim]:
        barrier.wait()
        won = []
        while (claim := take(database, f"node-{number}", Slot(f"prepare-{len(won)}", "prepare"))) is not None:
            won.append(claim)
        return won

    with ThreadPoolExecutor(6) as pool:
        won = [claim for mine in pool.map(work, range(6)) for claim in mine]
    assert Counter(claim.token.job_id for claim in won) == Counter(jobs)
    assert {claim.kind for claim in won} == {"prepare"}
    assert take(database, "another", CPU) is None, "none is ready to train"
    stale = won[0]
    with database.write() as session:
        session.execute(update(Job).where(Job.id == stale.token.job_id).values(lease_until=db_now() - 1))
    with database.write() as session:
        lease_expiry.reap(session, LossPolicy())
    fresh = take(database, "another", Slot("prepare-0", "prepare"))
    assert fresh is not None and fresh.token.job_id == stale.token.job_id and fresh.token.attempt == 2
    with database.write() as session:
        assert finish(session, stale.token, "prepare", Succeeded({"model_dir": "theirs"}), 0, RetryPolicy()) is None
    assert row(stale.token.job_id).prepared is None
    with database.write() as session:
        assert finish(session, fresh.token, "prepare", Succeeded({"model_dir": "ours"}), 0, RetryPolicy())
    assert row(stale.token.job_id).prepared == {"model_dir": "ours"}


# -- finish


def test_of_many_ends_of_one_attempt_one_is_written(database: Database, make_job: Make, row: Row) -> None:
    for _ in range(6):
        job_id = make_job()
        claim = take(database, "box", CPU)
        assert claim is not None
        with database.write() as session:
            claims.running(session, claim.token)
        artifact = {"path": "a", "kind": "adapter", "bytes": 1, "sha256": "0" * 64}
        outcomes = [Succeeded({"n": n}, [artifact]) for n in range(2)]
        outcomes += [Failed("user", "x", "y"), Requeued("z")]  # type: ignore[list-item]
        barrier = Barrier(len(outcomes))

        def end(
            outcome: Succeeded, claim: Claim = claim, barrier: Barrier = barrier, policy: RetryPolicy = RetryPolicy()
        ) -> Status | None:
            barrier.wait()
            with database.write() as session:
                return finish(session, claim.token, "train", outcome, 0, policy)

        with ThreadPoolExecutor(len(outcomes)) as pool:
            ends = list(pool.map(end, outcomes))
        (written,) = [status for status in ends if status is not None]
        job = row(job_id)
        assert job.status == written
        with database.read() as session:
            query = select(func.count()).where(Artifact.job_id == job_id)
            assert session.execute(query).scalar_one() == (written is Status.SUCCEEDED)
            told = session.execute(select(Event.data).where(Event.job_id == job_id).order_by(Event.seq)).scalars().all()
        assert [change["to"] for change in told] == ["queued", "starting", "running", written.value]
        with database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(status="cancelled"))


# -- outbox


def test_two_relays_at_once_lose_no_ring(database: Database, make_job: Make) -> None:
    """Two workers that both believe to lead: a ring may sound twice, which changes nothing, and never not at all."""
    jobs = [make_job() for _ in range(40)]
    heard: list[str] = []
    lock, barrier = Lock(), Barrier(3)

    def publish(job_id: str) -> None:
        with lock:
            heard.append(job_id)

    def relay() -> None:
        barrier.wait()
        for _ in range(20):
            outbox.relay(database, publish, limit=7)

    def ring() -> list[str]:
        barrier.wait()
        return [make_job() for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        relays = [pool.submit(relay) for _ in range(2)]
        jobs += pool.submit(ring).result(250)
        for future in relays:
            future.result(250)
    while outbox.relay(database, publish):
        pass
    assert set(heard) == set(jobs)
    with database.read() as session:
        assert session.execute(select(func.count()).select_from(OutboxMessage)).scalar_one() == 0


# -- clocks


def run(database: Database, skew: float, node: str, *does: str) -> list[str]:
    """What a process answers whose clock is wrong by `skew` seconds."""
    return skewed.answers(database, skew, node, does)


def test_wrong_clocks_of_nodes_move_no_lease(database: Database, make_job: Make, row: Row) -> None:
    first, second = make_job(), make_job()
    day = 86_400.0
    assert run(database, day, "early", "claim", "lead") == [f"claim {first}", "lead True"]
    assert run(database, -day, "late", "reap", "lead", "claim", "reap") == [
        "reap 0",
        "lead False",
        f"claim {second}",
        "reap 0",
    ], "a lease of another clock's future is not taken for one that never ends, nor ours for one of the past"
    assert run(database, day, "early", "reap") == ["reap 0"], "nor is that of the late one"
    for job_id in (first, second):
        until = row(job_id).lease_until
        assert until is not None and 0 < until - database.now() <= 60
    with database.read() as session:
        assert 0 < session.execute(select(Leader.until)).scalar_one() - database.now() <= 60
    with database.write() as session:
        session.execute(update(Job).values(lease_until=db_now() - 1))
        session.execute(update(Leader).values(until=db_now() - 1))
    assert run(database, -day, "late", "lead", "reap") == ["lead True", "reap 2"], "it is over by the database's clock"
    assert not leader.lead(database, "housekeeping", "early", 60)
