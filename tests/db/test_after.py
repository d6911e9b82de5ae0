"""Jobs that wait for the end of others: in no line before it, in one exactly once after it, and never stranded."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import func, select

from core.db.engine import Database
from core.db.tables import Event, Job, JobDependency, OutboxMessage
from core.errors import Conflict, SpecError
from core.jobs.admission import dependencies
from core.jobs.base.slots import Slot
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import claims, deletion, submit
from core.jobs.lifecycle.finish import Failed, Outcome, RetryPolicy, Succeeded, finish
from core.jobs.views import explain
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from tests.support.killed_change import url_of

ADA = Actor("user-ada", "proj-lab", "req-1")
FAILED = Failed("user", "x", "boom")


def make(database: Database, *after: str | dict[str, str], name: str | None = None) -> str:
    raw = {"model": "m", "data": "file-0123456789abcdefghjkmnpqrs", "after": list(after), "name": name}
    with database.write() as session:
        return submit.submit(session, ADA, resolve(JobSpec.model_validate(raw))).id


def work(database: Database, outcome: Outcome | None = None) -> str | None:
    """A worker that prepares and trains the job whose turn it is; None: no job stands in line."""
    done = None
    for slot, end in ((Slot("prepare-0", "prepare"), Succeeded({"path": "m"})), (Slot("cpu", "cpu"), outcome)):
        with database.write() as session:
            claim = claims.claim(session, "worker", "node", slot, 60)
            if claim is None:
                return done
        with database.write() as session:
            claims.running(session, claim.token)
            finish(session, claim.token, claim.kind, end or Succeeded({}), 0, RetryPolicy())
        done = claim.token.job_id
    return done


def turn(database: Database) -> list[bool]:
    """What the housekeeper does."""
    with database.read() as session:
        due = dependencies.due(session)
    told = []
    for job_id in due:
        with database.write() as session:
            told.append(dependencies.settle(session, job_id))
    return told


def state(database: Database, job_id: str) -> tuple[str, str]:
    with database.read() as session:
        job = session.get_one(Job, job_id)
        return job.status, job.reason


def test_a_job_starts_when_all_that_it_waits_for_have_ended_as_they_must(database: Database) -> None:
    first, second = make(database, name="pretraining"), make(database)
    waiting = make(database, first, {"job": second, "on": "end"})
    status, reason = state(database, waiting)
    assert status == "queued"
    assert reason == f"waits for `{first}` (pretraining) to succeed, `{second}` to end"
    assert work(database) == first and turn(database) == [False]
    assert state(database, waiting)[1] == f"waits for `{second}` to end"
    assert work(database, FAILED) == second
    assert work(database) is None, "it stands in no line before the housekeeper has looked"
    assert turn(database) == [True] and turn(database) == []
    assert work(database) == waiting and state(database, waiting)[0] == "succeeded"
    with database.read() as session:
        rows = session.execute(select(Event.data).where(Event.job_id == waiting, Event.type == "after")).scalars()
        assert [row["left"] for row in rows] == [1, 0]


def test_a_job_in_the_queue_says_what_it_waits_for_and_holds_nobody_up(database: Database) -> None:
    first = make(database, name="slow")
    waiting, other = make(database, first), make(database)
    with database.read() as session:
        told = explain.job(session, explain.QueueSettings(60), session.get_one(Job, waiting))
        assert told is not None and (told.code, told.position) == ("after", None)
        assert told.reason == f"waits for `{first}` (slow) to succeed"
        assert claims.runnable(session) == first
    assert [work(database), work(database), work(database)] == [first, other, None]


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
def test_a_job_whose_turn_can_never_come_is_cancelled_and_so_are_those_behind_it(database: Database, how: str) -> None:
    first = make(database, name="one")
    second = make(database, first)
    third, whatever = make(database, second), make(database, {"job": second, "on": "end"})
    if how == "fails":
        assert work(database, FAILED) == first
    else:
        with database.write() as session:
            submit.cancel(session, ADA, first)
    while turn(database):
        pass
    past = "failed" if how == "fails" else "been cancelled"
    assert state(database, second) == ("cancelled", f"cancelled: `{first}` (one) has {past}, and had to succeed first")
    assert state(database, third) == (
        "cancelled",
        f"cancelled: `{second}` has been cancelled, and had to succeed first",
    )
    assert work(database) == whatever
    with database.write() as session:
        again = submit.retry(session, ADA, second).id
    assert work(database) == again, "a retry waits for nothing"


def test_a_paused_job_is_settled_too_and_goes_on_when_it_is_resumed(database: Database) -> None:
    first = make(database)
    waiting = make(database, first)
    with database.write() as session:
        submit.pause(session, ADA, waiting)
    assert work(database) == first and turn(database) == [True] and work(database) is None
    with database.write() as session:
        submit.resume(session, ADA, waiting)
    assert work(database) == waiting


def test_what_has_ended_already_is_not_waited_for_or_refused(database: Database) -> None:
    first, second = make(database), make(database)
    assert work(database) == first and work(database, FAILED) == second
    waiting = make(database, first, {"job": second, "on": "end"})
    assert state(database, waiting)[1] == "waits for a worker to prepare its model"
    for wrong, code in ((second, "after_failed"), ("job-00000000000000000000000000", "after_not_found")):
        with pytest.raises(SpecError) as refused:
            make(database, first, wrong)
        assert refused.value.code == code and refused.value.field == "after.1.job"


def test_a_job_that_others_wait_for_is_not_deleted(database: Database) -> None:
    first = make(database)
    waiting = make(database, first)
    assert work(database) == first
    with database.write() as session, pytest.raises(Conflict, match=f"`{waiting}` waits for this job"):
        deletion.remove(session, ADA, first, deletion.Freed(), 1.0)
    assert turn(database) == [True]
    with database.write() as session:
        assert deletion.remove(session, ADA, first, deletion.Freed(), 1.0)
        assert session.execute(select(func.count()).select_from(JobDependency)).scalar_one() == 0
    assert work(database) == waiting


def test_any_number_of_housekeepers_may_look_at_once(database: Database) -> None:
    first = make(database)
    waiting = make(database, first)
    assert work(database) == first
    together = Barrier(4)

    def look() -> bool:
        together.wait()
        with database.write() as session:
            return dependencies.settle(session, waiting)

    with ThreadPoolExecutor(4) as threads:
        told = [one.result() for one in [threads.submit(look) for _ in range(4)]]
    assert sorted(told) == [False, False, False, True]
    with database.read() as session:
        rung = select(func.count()).select_from(OutboxMessage).where(OutboxMessage.job_id == waiting)
        assert session.execute(rung).scalar_one() == 2, "once when it was submitted, once when its time had come"


def _dies(url: str, job_id: str) -> None:
    database = Database(url)
    with database.write() as session:
        dependencies.settle(session, job_id)
        session.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_housekeeper_that_is_killed_in_the_middle_has_done_nothing(database: Database) -> None:
    first = make(database)
    waiting = make(database, first)
    assert work(database) == first
    database.dispose()  # its connections are not the fork's
    child = multiprocessing.get_context("fork").Process(target=_dies, args=(url_of(database), waiting))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    with database.read() as session:
        assert session.get_one(Job, waiting).unmet == 1
    assert turn(database) == [True] and work(database) == waiting
