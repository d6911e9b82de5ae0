"""Pipelines: each step is submitted exactly once, whoever looks and whoever is killed, and gates hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from core.db.engine import Database
from core.db.tables import (
    Delivery,
    Event,
    File,
    Job,
    Membership,
    OutboxMessage,
    Pipeline,
    PipelineEvent,
    Project,
    Webhook,
)
from core.errors import Conflict, NotFound, SpecError
from core.jobs.base.slots import Slot
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import claims, deletion, submit
from core.jobs.lifecycle.finish import Failed, Outcome, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.pipelines import advance, records, wishes
from core.jobs.lifecycle.pipelines.wishes import PlannedStep
from core.jobs.policies.volume import VolumeLimits
from core.spec.job import JobSpec
from core.spec.pipeline import parse_pipeline, stand_in
from core.spec.resolve import resolve
from tests.support.killed_change import killed, url_of

ADA = Actor("user-ada", "proj-lab", "req-1")
FILE = "file-0123456789abcdefghjkmnpqrs"
ADAPTER = [
    {"path": f"adapter/{name}", "kind": "adapter", "bytes": 4, "sha256": "ab" * 32}
    for name in ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json")
]
GATE = {"metric": "eval_loss", "min": None, "max": 1.5}


@pytest.fixture
def lab(database: Database) -> Database:
    with database.write() as session:
        session.execute(insert(Membership).values(user_id=ADA.user_id, project_id=ADA.project_id, role="member"))
        owned = {"owner_id": ADA.user_id, "project_id": ADA.project_id}
        about = {"filename": "a.jsonl", "bytes": 1, "sha256": "0" * 64, "rows": 1, "format": "text"}
        session.execute(insert(File).values(id=FILE, **owned, **about))
    return database


def planned(model: Any, gates: list[dict[str, Any]] | None = None) -> PlannedStep:
    spec = resolve(JobSpec.model_validate({"model": model, "data": FILE}))
    return PlannedStep("", spec.model_dump(mode="json"), gates or [])


def make(database: Database, gates: list[dict[str, Any]] | None = None, steps: int = 3) -> str:
    """Steps `one`, `two` and `three`, each from the one before; the gates are those of the first."""
    names = ("one", "two", "three")
    models = ["team/tiny", *({"type": "job", "id": stand_in(number)} for number in range(steps - 1))]
    made = [planned(model, gates if number == 0 else None) for number, model in enumerate(models)]
    named = [PlannedStep(name, step.spec, step.gates) for name, step in zip(names[:steps], made, strict=True)]
    with database.write() as session:
        return wishes.create(session, ADA, "chain", [], named).id


def work(database: Database, outcome: Outcome | None = None) -> str:
    """A worker that prepares and trains the job whose turn it is."""
    done = outcome or Succeeded({"train_loss": 2.0, "eval_after": {"eval_loss": 1.0}}, ADAPTER)
    model = Succeeded({"model_dir": "models/x", "source": {"type": "hub", "id": "team/tiny", "commit": "c" * 40}})
    for slot, end in ((Slot("prepare-0", "prepare"), model), (Slot("cpu", "cpu"), done)):
        with database.write() as session:
            claim = claims.claim(session, "worker", "node", slot, 60)
            assert claim is not None, "nothing waits"
        with database.write() as session:
            claims.running(session, claim.token)
            finish(session, claim.token, claim.kind, end, 0, RetryPolicy())
    return claim.token.job_id


def turn(database: Database, **bounds: int) -> list[bool]:
    with database.read() as session:
        due = advance.due(session)
    return [advance.advance(database, one, VolumeLimits(**bounds)) for one in due]


def look(database: Database, pipeline_id: str) -> tuple[str, str, list[str | None]]:
    """Status, reason, and the status of each step's job."""
    with database.read() as session:
        pipeline = session.get_one(Pipeline, pipeline_id)
        steps = records.steps_of(session, [pipeline_id])[pipeline_id]
        jobs = records.jobs_of(session, steps)
        states = [None if step.job_id is None else jobs[step.job_id].status for step in steps]
        return pipeline.status, pipeline.reason, states


def jobs(database: Database) -> list[Job]:
    with database.read() as session:
        return list(session.execute(select(Job).order_by(Job.id)).scalars())


def test_each_step_starts_from_the_one_before_and_the_last_ends_the_pipeline(lab: Database) -> None:
    with lab.write() as session:
        about = {"name": "ci", "kind": "standard", "url": "https://ci", "secrets": [], "all_jobs": True}
        owned = {"owner_id": ADA.user_id, "project_id": ADA.project_id}
        session.execute(insert(Webhook).values(id="hook-1", events=["pipeline.succeeded"], **about, **owned))
    pipeline_id = make(lab, [GATE])
    assert turn(lab) == [], "its first job waits"
    made = []
    for _ in range(3):
        made.append(work(lab))
        assert turn(lab) == [True]
    assert turn(lab) == []
    assert look(lab, pipeline_id)[::2] == ("succeeded", ["succeeded"] * 3)
    rows = jobs(lab)
    assert [row.id for row in rows] == made and {row.pipeline_id for row in rows} == {pipeline_id}
    assert [row.spec["model"].get("id") for row in rows] == ["team/tiny", made[0], made[1]]
    assert [row.spec["model"].get("adapter") for row in rows[1:]] == ["continue", "continue"]
    assert rows[2].chain is not None and rows[2].chain["adapter"]["job"] == made[1]
    assert rows[2].chain["root"] == {"type": "hub", "id": "team/tiny", "revision": "c" * 40}
    assert [one["job"] for one in rows[2].lineage or ()] == [made[1], made[0]]
    with lab.read() as session:
        told = records.events_after(session, pipeline_id, 0, 100)
        assert [one.seq for one in told] == list(range(1, len(told) + 1))
        assert [one.type for one in told] == ["status", "step", "step", "step", "status"]
        (notice,) = session.execute(select(Delivery)).scalars()
        assert (notice.type, notice.data["id"]) == ("pipeline.succeeded", pipeline_id)
        (step, *_) = records.steps_of(session, [pipeline_id])[pipeline_id]
        assert step.passed == [{**GATE, "value": 1.0, "passed": True}]


def test_a_gate_that_fails_ends_the_pipeline_and_a_retry_begins_there_or_where_it_is_told(lab: Database) -> None:
    pipeline_id = make(lab, [{**GATE, "max": 0.5}, {**GATE, "metric": "eval_rouge"}])
    first = work(lab)
    turn(lab)
    status, reason, states = look(lab, pipeline_id)
    assert (status, states) == ("failed", ["succeeded", None, None])
    assert "eval_loss is 1, and must be at most 0.5" in reason and "the result has no eval_rouge" in reason
    assert turn(lab) == []

    with lab.write() as session:
        again = wishes.retry(session, ADA, pipeline_id).id
    with lab.write() as session:
        assert wishes.retry(session, ADA, pipeline_id).id == again, "asked twice"
        steps = records.steps_of(session, [again])[again]
        assert steps[0].job_id != first and steps[0].retries is None, "a new one: that one has succeeded"
        wishes.cancel(session, ADA, again)
    with lab.write() as session:
        with pytest.raises(Conflict) as refused:
            wishes.retry(session, ADA, pipeline_id, "three")
        assert refused.value.code == "step_not_succeeded"
        with pytest.raises(NotFound):
            wishes.retry(session, ADA, pipeline_id, "four")
    with lab.write() as session:
        beyond = wishes.retry(session, ADA, pipeline_id, "two").id
    work(lab)
    turn(lab)
    work(lab)
    turn(lab)
    assert look(lab, beyond)[::2] == ("succeeded", ["succeeded"] * 3), "its gate counts as passed"


def test_a_step_that_fails_is_tried_again_from_its_checkpoints(lab: Database) -> None:
    pipeline_id = make(lab)
    first = work(lab)
    turn(lab)
    second = work(lab, Failed("user", "invalid_data", "row 3 is empty"))
    turn(lab)
    status, reason, states = look(lab, pipeline_id)
    assert (status, states) == ("failed", ["succeeded", "failed", None])
    assert reason == "its step `two` failed: row 3 is empty"
    with lab.write() as session:
        again = wishes.retry(session, ADA, pipeline_id).id
    third = work(lab)
    turn(lab)
    work(lab)
    turn(lab)
    assert look(lab, again)[::2] == ("succeeded", ["succeeded"] * 3)
    row = next(row for row in jobs(lab) if row.id == third)
    assert row.retry_of == second and row.resume_from[0]["job"] == second
    assert row.chain is not None and row.chain["adapter"]["job"] == first


def test_a_cancelled_pipeline_submits_nothing_more(lab: Database) -> None:
    pipeline_id = make(lab)
    with lab.write() as session:
        wishes.cancel(session, ADA, pipeline_id)
    assert look(lab, pipeline_id)[::2] == ("cancelled", ["cancelled", None, None])
    with lab.write() as session:
        wishes.cancel(session, ADA, pipeline_id)  # asked twice
    assert turn(lab) == [] and len(jobs(lab)) == 1

    another = make(lab)
    with lab.write() as session:
        submit.cancel(session, ADA, records.steps_of(session, [another])[another][0].job_id or "")
    turn(lab)
    assert look(lab, another) == ("cancelled", "its step `one` was cancelled", ["cancelled", None, None])
    with lab.write() as session:
        wishes.remove(session, ADA, another)
        wishes.remove(session, ADA, pipeline_id)
    with lab.read() as session:
        assert session.execute(select(func.count()).select_from(Pipeline)).scalar_one() == 0
        for job in session.execute(select(Job)).scalars():
            deletion.require(session, ADA, job.id)


def test_who_may_submit_no_more_has_nothing_submitted_and_a_full_queue_is_waited_for(lab: Database) -> None:
    pipeline_id = make(lab)
    work(lab)
    spec = resolve(JobSpec.model_validate({"model": "team/tiny", "data": FILE}))
    with lab.write() as session:
        other = submit.submit(session, ADA, spec).id
    assert turn(lab, waiting=1) == [False]
    status, reason, _ = look(lab, pipeline_id)
    assert status == "running" and "EFT_MAX_WAITING_JOBS" in reason
    with lab.read() as session:
        before = session.get_one(Project, ADA.project_id).spec_bytes
    assert turn(lab, waiting=1) == [False]
    with lab.read() as session:
        assert session.get_one(Project, ADA.project_id).spec_bytes == before, "nothing is half done"
        told = [one.type for one in records.events_after(session, pipeline_id, 0, 100)]
    assert told == ["status", "step", "waiting"], "told once"
    with lab.write() as session:
        submit.cancel(session, ADA, other)
    assert turn(lab, waiting=1) == [True]
    work(lab)
    with lab.write() as session:
        session.execute(update(Membership).values(role="viewer"))
    turn(lab)
    status, reason, states = look(lab, pipeline_id)
    assert (status, states) == ("failed", ["succeeded", "succeeded", None])
    assert "may no longer submit" in reason


def test_what_a_running_pipeline_needs_cannot_be_deleted(lab: Database) -> None:
    pipeline_id = make(lab, steps=2)
    first = work(lab)
    with lab.read() as session:
        assert pipeline_id in deletion.jobs_using_file(session, ADA.project_id, FILE)
        with pytest.raises(Conflict) as refused:
            deletion.require(session, ADA, first)
        assert refused.value.code == "job_in_use" and pipeline_id in refused.value.message
    turn(lab)
    with lab.read() as session, pytest.raises(Conflict):
        deletion.require(session, ADA, first)  # its child waits
    work(lab)
    turn(lab)
    with lab.read() as session:
        assert deletion.require(session, ADA, first) is not None, "a continued adapter needs it no more"


# -- crashes and races


def consistent(database: Database, pipeline_id: str, submitted: int) -> None:
    rows = jobs(database)
    with database.read() as session:
        steps = records.steps_of(session, [pipeline_id])[pipeline_id]
        assert [step.job_id for step in steps if step.job_id is not None] == [row.id for row in rows]
        assert len(rows) == submitted
        told = session.execute(select(PipelineEvent).order_by(PipelineEvent.seq)).scalars().all()
        assert [one.seq for one in told] == list(range(1, len(told) + 1))
        assert [one.data["job"] for one in told if one.type == "step"] == [row.id for row in rows]
        for row in rows:
            assert session.execute(select(Event).where(Event.job_id == row.id, Event.seq == 1)).one()
            assert session.execute(select(OutboxMessage).where(OutboxMessage.job_id == row.id)).first() is not None


def test_a_process_that_is_killed_at_any_point_submits_the_next_step_once_or_not_at_all(lab: Database) -> None:
    """At every statement and every commit between the end of a step and the next one's row."""
    pipeline_id = make(lab, [GATE])
    work(lab)
    at = 0
    while True:
        at += 1
        if not killed(lab, lambda database: advance.advance(database, pipeline_id), at):
            break
        with lab.read() as session:
            here = session.execute(select(func.count()).select_from(Job)).scalar_one()
        consistent(lab, pipeline_id, here)
        if here == 2:
            break  # the last point: it was killed once all was committed
    assert at > 8, "it was killed at each of its statements"
    assert turn(lab) == [] if here == 2 else [True]
    consistent(lab, pipeline_id, 2)
    assert look(lab, pipeline_id)[::2] == ("running", ["succeeded", "queued", None])


def test_any_number_of_housekeepers_at_once_submit_a_step_once(lab: Database) -> None:
    made = [make(lab, steps=2) for _ in range(4)]
    for _ in made:
        work(lab)
    each = [Database(url_of(lab)) for _ in range(3)]  # as processes of their own have them
    barrier = Barrier(6)

    def keep(number: int) -> int:
        database = each[number % 3]
        barrier.wait()
        return sum(advance.advance(database, one) for one in made)

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(keep, range(6))) == len(made)
    for database in each:
        database.dispose()
    assert len(jobs(lab)) == 2 * len(made)
    for one in made:
        assert look(lab, one)[::2] == ("running", ["succeeded", "queued"])


# -- documents


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"steps": []}, "steps"),
        ({"steps": [{"name": "a b", "job": {}}]}, "steps.0.name"),
        ({"steps": [{"name": "a", "job": {}}, {"name": "a", "job": {}}]}, "steps"),
        ({"steps": [{"name": "a", "job": {}, "gates": [{"metric": "eval_loss"}]}]}, "steps.0.gates.0"),
        ({"steps": [{"name": "a", "job": {}, "gate": {}}]}, "steps.0.gate"),
        ([], "steps"),
    ],
)
@pytest.mark.one_database
def test_a_pipeline_that_makes_no_sense_is_refused_with_its_field(document: Any, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_pipeline(document)
    assert refused.value.field == field
