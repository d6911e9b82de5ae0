"""Out of memory, a full disk and the time of earlier attempts: what the next attempt gets, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from core.db.engine import Database
from core.db.tables import Attempt, Event, Job
from core.jobs.admission import oom_backoff
from core.jobs.base.states import Status
from core.jobs.lifecycle import claims, relay
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Failed, NoRoom, Outcome, Requeued, RetryPolicy, finish
from core.jobs.lifecycle.submit import Actor, pause, retry, submit
from core.jobs.policies import disk_room as room
from core.spec.job import JobSpec
from core.spec.resolve import resolve

pytestmark = pytest.mark.one_database

ADA = Actor("user-ada", "proj-lab")
POLICY = RetryPolicy(max_machine_failures=2, backoff_seconds=30)
CPU, PREPARE = Slot("cpu", "cpu"), Slot("prepare-0", "prepare")
OUT_OF_MEMORY = Failed("memory", "out_of_memory", "out of memory", oom_backoff.BATCH)

Row = Callable[[str], Job]


def job_with(database: Database, **axes: Any) -> str:
    spec = JobSpec.model_validate({"model": "team/tiny", "data": "file-0123456789abcdefghjkmnpqrs", **axes})
    with database.write() as session:
        job = submit(session, ADA, resolve(spec))
        job.prepared = {"model_dir": "/models/tiny"}
        return job.id


def won(database: Database) -> Claim:
    with database.write() as session:
        claim = claims.claim(session, "worker-a", "box", CPU, 60)
    assert claim is not None
    return claim


def end(database: Database, claim: Claim, outcome: Outcome, code: int | None = 1) -> Status | None:
    with database.write() as session:
        return finish(session, claim.token, claim.kind, outcome, code, POLICY)


def test_out_of_memory_halves_the_micro_batch_down_to_one(database: Database, row: Row) -> None:
    job_id = job_with(database, training={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3})
    for batch, accumulation in ((2, 6), (1, 12)):
        assert end(database, won(database), OUT_OF_MEMORY) is Status.QUEUED
        job = row(job_id)
        assert job.adjusted == {oom_backoff.BATCH: batch, oom_backoff.ACCUMULATION: accumulation}
        assert f"per_device_train_batch_size = {batch}" in job.reason
        assert job.machine_failures == 0 and job.not_before is None
        assert job.spec["training"]["per_device_train_batch_size"] == 4, "the spec stays as it was submitted"
    with database.read() as session:
        told = session.execute(select(Event.data).order_by(Event.seq.desc()).limit(1)).scalar_one()
    assert told["adjusted"] == {oom_backoff.BATCH: 1, oom_backoff.ACCUMULATION: 12}
    assert told["failure"]["class"] == "memory"
    claim = won(database)
    spec = oom_backoff.apply(JobSpec.model_validate(claim.spec), claim.adjusted).training
    assert (spec.per_device_train_batch_size, spec.gradient_accumulation_steps) == (1, 12)
    assert end(database, claim, OUT_OF_MEMORY) is Status.FAILED
    failure = row(job_id).failure
    assert failure is not None
    assert (failure["class"], failure["code"]) == ("memory", "out_of_memory")
    assert "per_device_train_batch_size = 1" in failure["message"] and "max_length" in failure["message"]
    with database.write() as session:
        again = retry(session, ADA, job_id)
        assert again.adjusted == {oom_backoff.BATCH: 1, oom_backoff.ACCUMULATION: 12}, "a retry does not begin anew"


def test_the_evaluation_has_a_batch_of_its_own(database: Database, row: Row) -> None:
    data = {"train": "file-0123456789abcdefghjkmnpqrs", "eval": "file-0123456789abcdefghjkmnpqrt"}
    job_id = job_with(database, data=data)
    fault = Failed("memory", "out_of_memory", "out of memory", oom_backoff.EVAL_BATCH)
    assert end(database, won(database), fault) is Status.QUEUED
    assert row(job_id).adjusted == {oom_backoff.EVAL_BATCH: 4}
    assert end(database, won(database), OUT_OF_MEMORY) is Status.QUEUED
    assert row(job_id).adjusted == {oom_backoff.EVAL_BATCH: 4, oom_backoff.BATCH: 4, oom_backoff.ACCUMULATION: 2}


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ((9, 2), (3, 6)),
        ((7, 1), (1, 7)),
        ((6, 5), (3, 10)),
        ((2, 2048), (1, 4096)),
        ((2, 4096), None),
        ((1, 8), None),
    ],
)
def test_a_step_keeps_its_rows(training: tuple[int, int], expected: tuple[int, int] | None) -> None:
    values = {"per_device_train_batch_size": training[0], "gradient_accumulation_steps": training[1]}
    spec = JobSpec.model_validate({"model": "team/tiny", "data": "file-0123456789abcdefghjkmnpqrs", "training": values})
    changes = oom_backoff.smaller(spec, oom_backoff.BATCH)
    assert (changes and tuple(changes.values())) == expected


def test_memory_that_a_smaller_batch_would_not_free_ends_the_job(database: Database, row: Row) -> None:
    job_id = job_with(database)
    assert end(database, won(database), Failed("memory", "out_of_memory", "while loading", "model")) is Status.FAILED
    assert (row(job_id).failure or {})["message"] == "while loading"


def test_a_pause_waits_for_its_owner_even_after_out_of_memory(database: Database, row: Row) -> None:
    job_id = job_with(database)
    claim = won(database)
    with database.write() as session:
        pause(session, ADA, job_id)
    assert end(database, claim, OUT_OF_MEMORY) is Status.PAUSED
    assert row(job_id).adjusted == {oom_backoff.BATCH: 4, oom_backoff.ACCUMULATION: 2}


def again(database: Database, room: int) -> Claim | None:
    """What a worker would get with so many bytes to spare, once it is time."""
    with database.write() as session:
        session.execute(update(Job).values(not_before=None))
        return claims.claim(session, "worker-a", "box", CPU, 60, room=room)


def test_a_full_disk_costs_no_retry_and_waits_longer_each_time(database: Database, row: Row) -> None:
    """The size is not known: a quota, say, or not even an event could be written."""
    job_id = job_with(database)
    for wait in (60, 120, 240, 480, 960, 1920, 3600, 3600):
        claim = again(database, 0)
        assert claim is not None
        before = database.now()
        assert end(database, claim, NoRoom("no space left for weights.safetensors"), 74) is Status.QUEUED
        job, after = row(job_id), database.now()
        assert job.not_before is not None and before <= job.not_before - wait <= after
    assert job.machine_failures == 0
    assert job.reason == "waits for room on the data root: no space left for weights.safetensors"
    with database.read() as session:
        assert not room.stale(session, 10 << 30, 1 << 30), "free bytes are no help here: its words stay until its time"
        assert claims.runnable(session) is None


def test_a_job_waits_for_the_room_it_needs(database: Database, row: Row) -> None:
    """Not claimed, not rung for, and shown with both figures, until its bytes are free; then at once."""
    job_id, other = job_with(database), job_with(database)
    assert end(database, won(database), NoRoom("its checkpoint of 301 MiB does not fit", 300 << 20), 74)
    job = row(job_id)
    assert (job.status, job.needs_bytes, job.not_before) == ("queued", 300 << 20, None)
    with database.read() as session:
        told = session.execute(select(Event.data).where(Event.job_id == job_id).order_by(Event.seq.desc()).limit(1))
        data = told.scalar_one()
    assert (data["failure"]["class"], data["failure"]["code"]) == ("machine", "no_space")
    assert data["needs_bytes"] == 300 << 20 and "301 MiB" in data["reason"]
    reserve = 1 << 30
    for free, words in ((1224, "1224 MiB free"), (1323, "1323 MiB free")):
        with database.write() as session:
            assert room.tell(session, free << 20, reserve) == [job_id]
        assert row(job_id).reason == (
            f"waits for room on the data root: {words}, needs 1324 (300 for itself, 1024 stay in reserve)"
        )
        with database.read() as session:
            assert not room.stale(session, (free << 20) + 1000, reserve), "nothing is written for less than a MiB"
    smaller = again(database, 299 << 20)
    assert smaller is not None and smaller.token.job_id == other, "others go on"
    with database.read() as session:
        assert claims.runnable(session, room=299 << 20) is None
        assert claims.runnable(session, room=300 << 20) == job_id
    with database.write() as session:
        assert room.tell(session, 1324 << 20, reserve) == [job_id]
    assert row(job_id).reason == "waits for a slot"
    assert end(database, smaller, Requeued("a test"), 75)
    mine = again(database, 300 << 20)
    assert mine is not None and mine.token.job_id == job_id
    line = {"seq": 1, "time": 1.0, "type": "checkpoint", "step": 10, "micro_step": 0, "path": "checkpoints/x"}
    with database.write() as session:
        assert relay.relay(session, mine.token, relay.EventBatch(10, [line]))
    assert (row(job_id).needs_bytes, row(job_id).full_disks) == (None, 0), "it has found its room"


def test_waiting_jobs_say_that_there_is_no_room(database: Database, row: Row) -> None:
    first, second, unprepared = job_with(database), job_with(database), job_with(database)
    with database.write() as session:
        session.get_one(Job, unprepared).prepared = None
    running = won(database)
    assert running.token.job_id == first
    with database.write() as session:
        assert set(room.tell(session, 100 << 20, 1 << 30)) == {second, unprepared}
    with database.write() as session:
        assert not room.stale(session, 99 << 20, 1 << 30), "they say so already"
        assert room.tell(session, 99 << 20, 1 << 30) == []
    assert row(second).reason == "waits for room on the data root: 100 MiB free, needs 1024"
    assert not row(first).reason.startswith(room.WAITS)
    with database.write() as session:
        assert len(room.tell(session, 2 << 30, 1 << 30)) == 2
    assert row(second).reason == "waits for a slot"
    assert row(unprepared).reason == "waits for a worker to prepare its model"


def test_earlier_attempts_at_training_are_added_up(database: Database) -> None:
    job_id = job_with(database)
    assert won(database).spent_seconds == 0
    with database.write() as session:
        job = session.get_one(Job, job_id)
        token = claims.Token(job_id, 1, "worker-a")
        assert finish(session, token, "train", Requeued("a test"), 75, POLICY) is Status.QUEUED
        session.execute(update(Attempt).values(ended_at=Attempt.started_at + 100))
        row = {"job_id": job_id, "owner_id": job.owner_id, "project_id": job.project_id, "node": "box"}
        prepared = {"worker": "w", "slot": "prepare-0", "kind": "prepare", "started_at": 0.0, "ended_at": 1000.0}
        session.add(Attempt(attempt=90, **row, **prepared))
    assert won(database).spent_seconds == pytest.approx(100)
