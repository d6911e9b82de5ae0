"""One leader, no lost wake-up, one worker a node."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import select, update

from core.db.engine import Database, db_now
from core.db.tables import Leader, Node, OutboxMessage
from core.jobs.base import outbox
from core.jobs.lifecycle import leader
from core.jobs.policies import nodes

Make = Callable[..., str]


def test_one_of_many_leads(database: Database) -> None:
    barrier = Barrier(8)

    def stand(number: int) -> bool:
        barrier.wait()
        return leader.lead(database, "housekeeping", f"worker-{number}", 30)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(stand, range(8))) == 1


def test_leading_goes_on_ends_and_passes(database: Database) -> None:
    assert leader.lead(database, "housekeeping", "a", 600)
    assert not leader.lead(database, "housekeeping", "b", 600)
    assert leader.lead(database, "housekeeping", "a", 600), "the leader keeps it"
    with database.write() as session:
        session.execute(update(Leader).values(until=db_now() - 0.01))
    assert leader.lead(database, "housekeeping", "b", 30), "after its time it is anybody's"
    assert not leader.lead(database, "housekeeping", "a", 30)
    leader.resign(database, "housekeeping", "a")  # not a's to give
    assert not leader.lead(database, "housekeeping", "a", 30)
    leader.resign(database, "housekeeping", "b")
    assert leader.lead(database, "housekeeping", "a", 30)


def test_roles_are_independent(database: Database) -> None:
    assert leader.lead(database, "housekeeping", "a", 30)
    assert leader.lead(database, "collection", "b", 30)


def waiting(database: Database) -> list[str]:
    with database.read() as session:
        return list(session.execute(select(OutboxMessage.job_id).order_by(OutboxMessage.id)).scalars())


def test_the_outbox_forgets_only_what_was_published(database: Database, make_job: Make) -> None:
    jobs = [make_job() for _ in range(3)]
    heard: list[str] = []

    def broken(job_id: str) -> None:
        if heard:
            raise ConnectionError("the broker is away")
        heard.append(job_id)

    with pytest.raises(ConnectionError):
        outbox.relay(database, broken)
    assert waiting(database) == jobs, "nothing is lost; what was published will be again"
    heard.clear()
    assert outbox.relay(database, heard.append) == 3
    assert heard == jobs
    assert waiting(database) == []
    assert outbox.relay(database, heard.append) == 0


def test_a_ring_inside_a_transaction_that_fails_was_never_there(database: Database) -> None:
    with pytest.raises(RuntimeError), database.write() as session:
        outbox.ring(session, "job-1")
        raise RuntimeError
    assert waiting(database) == []


def test_a_node_has_one_worker(database: Database) -> None:
    slots = [{"id": "cpu", "kind": "cpu"}]
    with database.write() as session:
        nodes.register(session, "box", "worker-a", "0.1.0", slots, [])
        assert nodes.heartbeat(session, "box", "worker-a")
    with database.write() as session:
        nodes.register(session, "box", "worker-b", "0.1.0", slots, ["a note"])
    with database.write() as session:
        assert not nodes.heartbeat(session, "box", "worker-a"), "replaced"
        assert nodes.heartbeat(session, "box", "worker-b")
        assert nodes.alive(session, 30) == 1
        session.execute(update(Node).values(heartbeat_at=db_now() - 60))
        assert nodes.alive(session, 30) == 0
