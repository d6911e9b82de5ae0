"""A user's wishes in every state: cancel, pause, resume, retry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from core.db.engine import Database
from core.db.tables import Allocation, Event, Job, OutboxMessage
from core.errors import Conflict, NotFound
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims, lease_expiry
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.lease_expiry import LossPolicy
from core.jobs.lifecycle.submit import Actor, cancel, pause, resume, retry, submit
from core.spec.job import JobSpec
from core.spec.resolve import resolve

ADA, EVE = Actor("user-ada", "proj-lab"), Actor("user-ada", "proj-other")
CPU, PREPARE = Slot("cpu", "cpu"), Slot("prepare-0", "prepare")

Make = Callable[..., str]
Row = Callable[[str], Job]


def won(database: Database, slot: Slot = CPU, *, running: bool = True) -> Claim:
    with database.write() as session:
        claim = claims.claim(session, "worker-a", "box", slot, 60)
    assert claim is not None
    if running:
        with database.write() as session:
            claims.running(session, claim.token)
    return claim


def end(database: Database, claim: Claim, outcome: Outcome) -> Status | None:
    with database.write() as session:
        return finish(session, claim.token, claim.kind, outcome, 75, RetryPolicy())


def wish(database: Database, what: Callable[..., Job], job_id: str, actor: Actor = ADA) -> str:
    with database.write() as session:
        return what(session, actor, job_id).id


def rings(database: Database) -> int:
    with database.read() as session:
        return len(session.execute(select(OutboxMessage)).all())


@pytest.mark.parametrize("slot", [CPU, PREPARE], ids=lambda slot: slot.kind)
def test_a_running_job_pauses_once_its_process_is_gone(
    database: Database, make_job: Make, row: Row, slot: Slot
) -> None:
    job_id = make_job(prepared=slot is CPU)
    claim = won(database, slot)
    wish(database, pause, job_id)
    wish(database, pause, job_id)  # asking twice is fine
    assert (row(job_id).status, row(job_id).stop_requested) == ("pausing", "pause")
    with pytest.raises(Conflict, match="still writing"):
        wish(database, resume, job_id)
    assert end(database, claim, Requeued("asked to pause")) is Status.PAUSED
    job = row(job_id)
    assert (job.status, job.stop_requested, job.worker, job.lease_until) == ("paused", None, None, None)
    with database.read() as session:
        assert session.execute(select(Allocation.slot).where(Allocation.released_at.is_(None))).all() == []
        assert claims.runnable(session) is None
    with database.write() as session:
        assert claims.claim(session, "worker-a", "box", slot, 60) is None, "a paused job is not claimed"

    before = rings(database)
    wish(database, resume, job_id)
    assert row(job_id).status == "queued"
    assert rings(database) == before + 1
    assert won(database, slot, running=False).token.attempt == 2


def test_a_waiting_job_pauses_at_once(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    wish(database, pause, job_id)
    assert row(job_id).status == "paused"
    wish(database, cancel, job_id)
    assert row(job_id).status == "cancelled"


@pytest.mark.parametrize(
    ("outcome", "after"),
    [
        (Succeeded({"train_loss": 1.0}), "succeeded"),
        (Failed("user", "bad_row", "line 3"), "failed"),
        (Requeued("asked to pause"), "paused"),
    ],
)
def test_an_end_is_an_end_even_if_a_pause_was_wanted(
    database: Database, make_job: Make, row: Row, outcome: Outcome, after: str
) -> None:
    job_id = make_job()
    claim = won(database)
    wish(database, pause, job_id)
    end(database, claim, outcome)
    assert row(job_id).status == after


def test_cancel_wins_over_pause(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    claim = won(database)
    wish(database, pause, job_id)
    wish(database, cancel, job_id)
    assert row(job_id).status == "stopping"
    with pytest.raises(Conflict):
        wish(database, pause, job_id)
    assert end(database, claim, Requeued("asked to pause")) is Status.CANCELLED


def test_a_worker_lost_while_pausing_leaves_a_paused_job(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    with database.write() as session:
        claims.claim(session, "worker-a", "box", CPU, -1)
    wish(database, pause, job_id)
    with database.write() as session:
        assert len(lease_expiry.reap(session, LossPolicy())) == 1
    assert row(job_id).status == "paused"


def test_retry_makes_a_new_job_once(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    with pytest.raises(Conflict, match="only a failed or cancelled job"):
        wish(database, retry, job_id)
    end(database, won(database), Failed("user", "bad_row", "line 3"))
    again = wish(database, retry, job_id)
    assert again != job_id
    assert (row(again).status, row(again).retry_of, row(again).spec) == ("queued", job_id, row(job_id).spec)
    assert wish(database, retry, job_id) == again, "the same while that one goes on"
    wish(database, cancel, again)
    assert wish(database, retry, job_id) not in (job_id, again)
    assert row(job_id).status == "failed", "an end is an end"


def test_every_change_names_the_request_it_comes_from(database: Database) -> None:
    """The one that submitted the job; for a wish of a user, the request that brought it."""
    spec = resolve(JobSpec.model_validate({"model": "team/tiny", "data": "file-0123456789abcdefghjkmnpqrs"}))
    with database.write() as session:
        job_id = submit(session, Actor("user-ada", "proj-lab", "req-1"), spec).id
        claims.claim(session, "worker-a", "box", Slot("prepare-0", "prepare"), 60)
    with database.write() as session:
        cancel(session, Actor("user-ada", "proj-lab", "req-2"), job_id)
    with database.write() as session:
        token = claims.Token(job_id, 1, "worker-a")
        assert finish(session, token, "prepare", Requeued("a test"), 75, RetryPolicy()) is Status.CANCELLED
    with database.read() as session:
        told = session.execute(select(Event.data).where(Event.job_id == job_id).order_by(Event.seq)).scalars().all()
    assert [(change["to"], change["request_id"]) for change in told] == [
        ("queued", "req-1"),
        ("preparing", "req-1"),
        ("stopping", "req-2"),
        ("cancelled", "req-1"),
    ]


@pytest.mark.parametrize("what", [cancel, pause, resume, retry], ids=lambda what: what.__name__)
def test_another_projects_job_is_not_there(
    database: Database, make_job: Make, row: Row, what: Callable[..., Job]
) -> None:
    job_id = make_job()
    with pytest.raises(NotFound):
        wish(database, what, job_id, EVE)
    assert row(job_id).status == "queued"
