"""From a prepared model to a claim: what does not fit fails or is passed over, and `method: auto` is settled once."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import func, select

from core.db.engine import Database
from core.db.tables import Event, Job, ModelShape
from core.jobs.admission import auto_method, fit, ready
from core.jobs.admission.ready import SHAPE, WHOLE
from core.jobs.base.slots import Key, Slot
from core.jobs.base.states import Status
from core.jobs.lifecycle.claims import Claim, claim
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.submit import Actor, pause, resume, retry, submit
from core.jobs.policies import nodes
from core.jobs.views import explain
from core.jobs.views.explain import QueueSettings
from core.plan.memory.plan import plan
from core.plan.models.shape import Shape
from core.spec.job import JobSpec
from core.spec.load import parse_job
from core.spec.resolve import resolve

pytestmark = pytest.mark.one_database

ADA = Actor("user-ada", "proj-lab")
LLAMA_1B = Shape.of_config(
    {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
)  # fmt: skip
PREPARED = {"model_dir": "models/x", "source": {}, SHAPE: LLAMA_1B.as_dict(), WHOLE: True}
SMALL, LARGE = 4.0, 80.0
"""Gigabytes of cards: the first has not room for full fine-tuning, the second has."""


class Box:
    """A node with a card, seen through the functions that its worker calls."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def node(self, name: str, gigabytes: float) -> None:
        slots: list[dict[str, Any]] = [
            {
                "id": f"GPU-{name}",
                "kind": "gpu",
                "host_bytes": 10**12,
                "gpu": {"vendor": "amd", "arch": "gfx942", "memory_bytes": round(gigabytes * 1e9), "index": 0},
            },
            {"id": "prepare-0", "kind": "prepare"},
        ]
        with self.database.write() as session:
            nodes.register(session, name, f"worker-{name}", "1", slots, [])

    def submit(self, **axes: Any) -> str:
        document = {"model": "a/b", "data": "file-" + "0" * 26, "method": "auto", "training": {"max_length": 256}}
        with self.database.write() as session:
            return submit(session, ADA, resolve(parse_job(document | axes))).id

    def prepare(self, job_id: str, policy: RetryPolicy | None = None, **more: Any) -> Status | None:
        with self.database.write() as session:
            won = claim(session, "worker-p", "box-p", Slot(f"prepare-{job_id}", "prepare"), 600)
            assert won is not None and won.token.job_id == job_id and won.kind == "prepare"
            return finish(session, won.token, "prepare", Succeeded(PREPARED | more), 0, policy or RetryPolicy())

    def claim(self, name: str, gigabytes: float) -> Claim | None:
        slot = Slot(f"GPU-{name}", "gpu", "amd", "gfx942", round(gigabytes * 1e9), host_bytes=10**12)
        with self.database.write() as session:
            return claim(session, f"worker-{name}", name, slot, 600)

    def end(self, won: Claim, outcome: Outcome) -> Status | None:
        with self.database.write() as session:
            return finish(session, won.token, won.kind, outcome, 1, RetryPolicy(backoff_seconds=0))

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.execute(select(Job).where(Job.id == job_id)).scalar_one()


@pytest.fixture
def box(database: Database) -> Box:
    return Box(database)


def method_of(won: Claim) -> str:
    return auto_method.effective(won.spec, won.settled, won.adjusted).method.type


def test_auto_is_settled_at_the_first_claim_and_stays(box: Box) -> None:
    box.node("small", SMALL)
    box.node("large", LARGE)
    job_id = box.submit()
    assert box.prepare(job_id) is Status.QUEUED
    first = box.claim("small", SMALL)
    assert first is not None and first.settled is not None and method_of(first) != "full"
    job = box.job(job_id)
    assert job.settled == first.settled and job.spec["method"]["type"] == "auto", "the spec stays as it was submitted"
    rejected = {one["rung"]: one["reason"] for one in first.settled["rejected"]}
    assert "more than" in rejected["full"]
    with box.database.read() as session:
        query = select(Event.data).where(Event.job_id == job_id, Event.type == "status").order_by(Event.seq.desc())
        data = session.execute(query.limit(1)).scalar_one()
    assert data["settled"] == first.settled and data["to"] == "starting"

    assert box.end(first, Requeued("the worker leaves")) is Status.QUEUED
    again = box.claim("large", LARGE)  # where full fine-tuning would fit
    assert again is not None and again.settled == first.settled and method_of(again) == method_of(first)
    assert box.end(again, Failed("machine", "killed", "gone")) is Status.QUEUED
    with box.database.write() as session:
        pause(session, ADA, job_id)
        resume(session, ADA, job_id)
    third = box.claim("large", LARGE)
    assert third is not None and third.settled == first.settled
    assert box.end(third, Failed("user", "invalid_data", "bad rows")) is Status.FAILED
    with box.database.write() as session:
        retried = retry(session, ADA, job_id).id
    assert box.job(retried).settled == first.settled, "its checkpoints are of that method"
    assert box.prepare(retried) is Status.QUEUED
    fourth = box.claim("large", LARGE)
    assert fourth is not None and fourth.token.job_id == retried and fourth.settled == first.settled


def test_full_where_it_fits(box: Box) -> None:
    box.node("large", LARGE)
    job_id = box.submit()
    box.prepare(job_id)
    won = box.claim("large", LARGE)
    assert won is not None and won.settled is not None and method_of(won) == "full"
    spec = auto_method.effective(won.spec, won.settled, won.adjusted)
    assert spec.optimizer.learning_rate == 2e-5 and won.settled["rejected"] == []


def test_what_was_settled_is_not_claimed_where_it_does_not_fit(box: Box) -> None:
    """Full fine-tuning began on a large card: a small one is none for it any more, and the line says so."""
    box.node("small", SMALL)
    box.node("large", LARGE)
    job_id = box.submit()
    box.prepare(job_id)
    first = box.claim("large", LARGE)
    assert first is not None and method_of(first) == "full"
    box.end(first, Requeued("the worker leaves"))
    assert box.claim("small", SMALL) is None
    assert box.claim("large", LARGE) is not None


def test_what_nothing_fits_is_tried_again_where_it_began(box: Box) -> None:
    """By its plan the least of it leaves no tenth of this card free. It is tried, and after that it is not stuck."""
    probe = resolve(parse_job({"model": "a/b", "data": "file-" + "0" * 26, "method": "auto"}))
    takes = fit.needs(probe, LLAMA_1B, 256, [])
    assert takes is not None
    gigabytes = takes.gpu * 1.02 / 1000
    box.node("tight", gigabytes)
    job_id = box.submit(training={"max_length": 256, "per_device_train_batch_size": 16})
    assert box.prepare(job_id) is Status.QUEUED
    first = box.claim("tight", gigabytes)
    assert first is not None and first.settled is not None and "nothing fits" in first.settled["reason"]
    assert first.adjusted["training.per_device_train_batch_size"] == 1, "it begins with the smallest batch"
    assert box.end(first, Requeued("the worker leaves")) is Status.QUEUED
    again = box.claim("tight", gigabytes)
    assert again is not None and (again.settled, again.adjusted) == (first.settled, first.adjusted)


def test_a_job_is_passed_over_where_it_does_not_fit(box: Box) -> None:
    box.node("small", SMALL)
    box.node("large", LARGE)
    large, small = box.submit(method="full"), box.submit(method="qlora")
    for job_id in (large, small):
        assert box.prepare(job_id) is Status.QUEUED
    won = box.claim("small", SMALL)
    assert won is not None and won.token.job_id == small and won.settled is None
    with box.database.read() as session:
        told = explain.job(session, QueueSettings(silent_after=90.0), box.job(large))
    assert told is not None and told.code == "turn", told
    card = Slot("GPU-small", "gpu", "amd", "gfx942", round(SMALL * 1e9), host_bytes=10**12)
    spec = JobSpec.model_validate(box.job(large).spec)
    whole = plan(spec, LLAMA_1B, longest=256, device=fit.device_of(card)).peak
    takes = Key.parse(box.job(large).queue_key).needs.plan
    assert takes is not None and told.reason.endswith(f"; needs 1 slot with {takes.words(card, whole)}"), told
    assert fit.gb(whole) in told.reason, "the figure of `eft plan`"
    won = box.claim("large", LARGE)
    assert won is not None and won.token.job_id == large


def test_what_fits_no_node_fails_before_it_takes_a_gpu(box: Box) -> None:
    box.node("small", SMALL)
    job_id = box.submit(method="full")
    assert box.prepare(job_id) is Status.FAILED
    failure = box.job(job_id).failure
    assert failure is not None
    assert (failure["class"], failure["code"], failure["field"]) == ("user", "fits_nowhere", "method")
    assert "`method: qlora`" in failure["message"] and "small/0" in failure["message"]
    with box.database.write() as session:
        retried = retry(session, ADA, job_id).id
    box.node("large", LARGE)
    assert box.prepare(retried) is Status.QUEUED, "a box has come that has room"


def test_the_check_can_be_switched_off(box: Box) -> None:
    box.node("small", SMALL)
    job_id = box.submit(method="full")
    assert box.prepare(job_id, RetryPolicy(memory_check=False)) is Status.QUEUED
    assert Key.parse(box.job(job_id).queue_key).needs.plan is None
    assert box.claim("small", SMALL) is not None


def test_without_nodes_nothing_is_refused(box: Box) -> None:
    job_id = box.submit(method="full")
    assert box.prepare(job_id) is Status.QUEUED
    assert box.claim("small", SMALL) is None, "it waits for a box that has room"
    assert box.claim("large", LARGE) is not None


def test_a_model_without_a_shape_is_planned_by_nobody(box: Box) -> None:
    box.node("small", SMALL)
    job_id = box.submit()
    assert box.prepare(job_id, **{SHAPE: None}) is Status.QUEUED
    won = box.claim("small", SMALL)
    assert won is not None and won.settled is not None and method_of(won) == "lora"
    assert "unknown" in won.settled["reason"]


def test_a_shape_is_kept_by_how_jobs_name_the_model(box: Box) -> None:
    box.node("large", LARGE)
    job_id = box.submit()
    spec = resolve(parse_job({"model": "a/b", "data": "file-" + "0" * 26}))
    with box.database.read() as session:
        assert ready.check(session, ADA.project_id, spec, None) is None
    box.prepare(job_id)
    box.prepare(box.submit())  # the same model again: one row
    with box.database.read() as session:
        assert session.execute(select(func.count()).select_from(ModelShape)).scalar_one() == 1
    assert SHAPE not in (box.job(job_id).prepared or {}), "the shape is kept once, not in every job"
