"""What an outcome makes of a job: state, words, retry, artifacts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select, update

from core.db.engine import Database
from core.db.tables import Allocation, Artifact, Attempt, Job, OutboxMessage
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.submit import Actor, cancel

ADA = Actor("user-ada", "proj-lab")
POLICY = RetryPolicy(max_machine_failures=2, backoff_seconds=30)
ARTIFACT = {"path": "adapter/adapter_model.safetensors", "kind": "adapter", "bytes": 12, "sha256": "0" * 64}

Make = Callable[..., str]
Row = Callable[[str], Job]


def won(database: Database, slot: Slot, *, running: bool = True) -> Claim:
    with database.write() as session:
        session.execute(update(Job).values(not_before=None))
        claim = claims.claim(session, "worker-a", "box", slot, 60)
    assert claim is not None
    if running:
        with database.write() as session:
            claims.running(session, claim.token)
    return claim


def end(database: Database, claim: Claim, outcome: Outcome, code: int | None = 0) -> Status | None:
    with database.write() as session:
        return finish(session, claim.token, claim.kind, outcome, code, POLICY)


CPU, PREPARE = Slot("cpu", "cpu"), Slot("prepare-0", "prepare")


@pytest.mark.parametrize("running", [True, False])
def test_success_lists_the_artifacts_and_frees_the_slot(
    database: Database, make_job: Make, row: Row, running: bool
) -> None:
    job_id = make_job()
    claim = won(database, CPU, running=running)
    assert end(database, claim, Succeeded({"train_loss": 1.0}, [ARTIFACT])) is Status.SUCCEEDED
    job = row(job_id)
    assert (job.status, job.result, job.worker, job.lease_until) == ("succeeded", {"train_loss": 1.0}, None, None)
    assert job.finished_at is not None
    with database.read() as session:
        assert session.execute(select(Artifact.path, Artifact.attempt)).one() == (ARTIFACT["path"], 1)
        assert session.execute(select(Allocation.released_at)).scalar_one() is not None
        attempt = session.execute(select(Attempt)).scalar_one()
    assert (attempt.exit_code, attempt.ended_at is not None) == (0, True)
    assert end(database, claim, Failed("user", "late", "no")) is None, "a job ends once"


def test_a_prepared_job_waits_for_a_slot(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job(prepared=False)
    assert end(database, won(database, PREPARE), Succeeded({"model_dir": "/m", "source": {}})) is Status.QUEUED
    assert row(job_id).prepared == {"model_dir": "/m", "source": {}}
    assert won(database, CPU).prepared == {"model_dir": "/m", "source": {}}


def test_a_fault_of_the_box_is_tried_again_and_later_each_time(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    fault = Failed("machine", "killed", "the process was ended by signal SIGKILL")
    for number, wait in ((1, 30), (2, 60)):
        before = database.now()
        assert end(database, won(database, CPU), fault, -9) is Status.QUEUED
        job, after = row(job_id), database.now()
        assert job.machine_failures == number
        assert job.not_before is not None and before <= job.not_before - wait <= after
        assert f"retry {number} of 2" in job.reason
    assert end(database, won(database, CPU), fault, -9) is Status.FAILED
    job = row(job_id)
    assert job.failure == {"class": "machine", "code": "killed", "message": fault.message, "field": None}


@pytest.mark.parametrize("failure", ["user", "memory", "internal"])
def test_other_faults_end_the_job(database: Database, make_job: Make, row: Row, failure: str) -> None:
    job_id = make_job()
    words = "line 3 is empty\n  and so is line 4"
    outcome = Failed(failure, "bad_row", words, "data.train")  # type: ignore[arg-type]
    assert end(database, won(database, CPU), outcome, 1) is Status.FAILED
    job = row(job_id)
    assert job.failure == {"class": failure, "code": "bad_row", "message": words, "field": "data.train"}
    assert job.reason == "line 3 is empty and so is line 4", "one line of a table"


def test_a_vanished_model_is_prepared_again(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    claim = won(database, CPU, running=False)
    assert end(database, claim, Failed("machine", "model_gone", "gone", prepare_again=True), None) is Status.QUEUED
    assert row(job_id).prepared is None
    assert won(database, PREPARE).token.job_id == job_id


def test_handed_back_costs_no_retry_and_rings(database: Database, make_job: Make, row: Row) -> None:
    job_id = make_job()
    assert end(database, won(database, CPU), Requeued("worker on box is leaving"), 75) is Status.QUEUED
    job = row(job_id)
    assert (job.machine_failures, job.reason) == (0, "waits to continue: worker on box is leaving")
    with database.read() as session:
        assert len(session.execute(select(OutboxMessage)).all()) == 2


@pytest.mark.parametrize("outcome", [Succeeded({}), Failed("internal", "x", "y"), Requeued("z")], ids=lambda o: o.kind)
def test_a_job_that_was_to_stop_is_cancelled_whatever_came_of_it(
    database: Database, make_job: Make, row: Row, outcome: Outcome
) -> None:
    job_id = make_job()
    claim = won(database, CPU)
    with database.write() as session:
        cancel(session, ADA, job_id)
    assert row(job_id).status == "stopping"
    assert end(database, claim, outcome, 75) is Status.CANCELLED
    assert row(job_id).stop_requested is None
