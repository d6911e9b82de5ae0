"""A drained node claims nothing, whoever serves it; what ran there is handed back with the name of who asked."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import select

from core.db.engine import Database
from core.db.tables import Audit, Event, Job, OutboxMessage
from core.errors import NotFound
from core.jobs.base import outbox
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, finish
from core.jobs.lifecycle.submit import Actor, pause
from core.jobs.policies import nodes

ADA = Actor("user-ada", "proj-lab", "req-1")
SLOTS = [{"id": "cpu", "kind": "cpu"}]

Make = Callable[..., str]
Row = Callable[[str], Job]


def register(database: Database, name: str = "box", worker: str = "worker-a") -> bool:
    with database.write() as session:
        return nodes.register(session, name, worker, "0.1.0", SLOTS, [])


def take(database: Database, node: str = "box", slot: str = "cpu") -> Claim | None:
    with database.write() as session:
        return claims.claim(session, f"worker-of-{node}", node, Slot(slot, "cpu"), 60)


def drain(database: Database, node: str = "box") -> None:
    with database.write() as session:
        nodes.drain(session, ADA, node, "a new power supply")


def test_nothing_is_claimed_on_it_until_undrained_also_by_a_new_worker(database: Database, make_job: Make) -> None:
    make_job(), make_job()
    assert not register(database)
    drain(database)
    assert take(database) is None
    assert register(database, worker="worker-b"), "it says so to the worker that comes after"
    assert take(database) is None
    assert take(database, "another-box") is not None
    with database.write() as session:
        nodes.undrain(session, ADA, "box")
    assert take(database) is not None


def test_what_runs_is_asked_to_leave_and_its_event_names_who_asked(
    database: Database, make_job: Make, row: Row
) -> None:
    drained, paused, elsewhere = make_job(), make_job(), make_job()
    register(database)
    first, second, third = take(database), take(database, slot="cpu-1"), take(database, "another-box")
    assert first is not None and second is not None and third is not None
    with database.write() as session:
        pause(session, ADA, paused)
    drain(database)
    with database.read() as session:
        wishes = [claims.stop_requested(session, claim.token) for claim in (first, second, third)]
    assert wishes == ["drain", "pause", ""], "a wish of the job's owner stands"
    with database.write() as session:
        back = Requeued("node box is drained")
        assert finish(session, first.token, "train", back, 75, RetryPolicy()) is Status.QUEUED
    job = row(drained)
    assert (job.status, job.stop_requested, job.machine_failures, job.losses) == ("queued", None, 0, 0)
    assert job.not_before is None, "another node may take it at once"
    with database.read() as session:
        query = select(Event.data).where(Event.job_id == drained).order_by(Event.seq.desc()).limit(1)
        told = session.execute(query).scalar_one()
        rings = session.execute(select(OutboxMessage.id).where(OutboxMessage.job_id == drained)).all()
    assert (told["to"], told["actor"]) == ("queued", "user-ada")
    assert told["drained"] == {"node": "box", "reason": "a new power supply"}
    assert len(rings) == 2, "its birth, and now"
    assert row(elsewhere).stop_requested is None


def test_asking_twice_is_fine_and_the_audit_says_who(database: Database, make_job: Make) -> None:
    job_id = make_job()
    register(database)
    drain(database)
    drain(database)
    for _ in range(2):
        with database.write() as session:
            nodes.undrain(session, ADA, "box")
    with database.read() as session:
        told = session.execute(select(Audit).where(Audit.target == "box").order_by(Audit.id)).scalars().all()
        last = session.execute(select(OutboxMessage.job_id).order_by(OutboxMessage.id.desc()).limit(1)).scalar_one()
        box = nodes.boxes(session, "box")[0]
    assert [(a.action, a.target, a.actor_id, a.request_id) for a in told] == [
        ("node.drain", "box", "user-ada", "req-1"),
        ("node.undrain", "box", "user-ada", "req-1"),
    ]
    assert told[0].data == {"reason": "a new power supply"}
    assert last == job_id, "the workers look again"
    assert (box.node.drained_at, box.drained_by) == (None, None)


def test_an_unknown_node(database: Database) -> None:
    for action in (lambda s: nodes.drain(s, ADA, "nowhere", ""), lambda s: nodes.undrain(s, ADA, "nowhere")):
        with pytest.raises(NotFound, match="nowhere"), database.write() as session:
            action(session)


def test_no_claim_begins_once_a_drain_is_answered(database: Database, make_job: Make) -> None:
    """Claims, renewals and a drain at once: nobody is in another's way, and what was claimed is asked to leave."""
    for _ in range(60):
        make_job()
    register(database)
    barrier = Barrier(4)
    answered: list[float] = []

    def work(number: int) -> list[tuple[Claim, float]]:
        won = []
        barrier.wait()
        for turn in range(15):
            began = time.monotonic()
            with database.write() as session:
                claim = claims.claim(session, "worker-a", "box", Slot(f"cpu-{number}-{turn}", "cpu"), 60)
            if claim is not None:
                won.append((claim, began))
            with database.write() as session:
                nodes.heartbeat(session, "box", "worker-a")
                for mine, _ in won:
                    claims.renew(session, mine.token, 60)
        return won

    def stop() -> None:
        barrier.wait()
        time.sleep(0.05)
        drain(database)
        answered.append(time.monotonic())

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, number) for number in range(3)]
        pool.submit(stop).result(250)
        won = [pair for result in results for pair in result.result(250)]
    assert [began for _, began in won if began > answered[0]] == []
    with database.read() as session:
        assert {claims.stop_requested(session, claim.token) for claim, _ in won} <= {"drain"}


def test_the_outbox_rings_for_a_drained_node_too(database: Database, make_job: Make) -> None:
    """A ring says "look"; a drained node looks, and finds nothing for itself."""
    make_job()
    register(database)
    drain(database)
    heard: list[str] = []
    outbox.relay(database, heard.append)
    assert len(heard) == 1 and take(database) is None
