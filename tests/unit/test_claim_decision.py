"""What a claim decides, without a database: the kind of attempt, the next state, its event, and the worker's token."""

from __future__ import annotations

from typing import Any

from core.db.tables import Job
from core.jobs.base.slots import Slot
from core.jobs.base.states import Status
from core.jobs.kinds import Kind
from core.jobs.lifecycle.claims import decide, kind_of

GPUS = (Slot("GPU-a", "gpu"), Slot("GPU-b", "gpu"))


def job(**more: Any) -> Job:
    """A row that no session has."""
    row = {"id": "job-1", "attempt": 2, "owner_id": "user-a", "project_id": "proj-a", "spec": {"model": "m"}}
    return Job(**row | {"prepared": {"model_dir": "/m"}, "resume_from": [], "adjusted": {"batch": 2}} | more)


def test_a_job_of_two_gpus_starts_on_both() -> None:
    claim, start = decide(job(), "worker-1", "box", GPUS, {}, 12.5)
    assert (claim.token.attempt, claim.token.worker, claim.kind, claim.slots) == (3, "worker-1", Kind.TRAIN, GPUS)
    assert (claim.adjusted, claim.settled, claim.spent_seconds) == ({"batch": 2}, None, 12.5)
    assert (start.after, start.reason) == (Status.STARTING, "starts on box, slots GPU-a, GPU-b")
    assert start.data == {"node": "box", "slot": "GPU-a", "slots": ["GPU-a", "GPU-b"]}
    assert start.first and not decide(job(started_at=1.0), "worker-1", "box", GPUS, {}, 0.0)[1].first


def test_a_job_without_its_model_is_prepared_and_has_not_started() -> None:
    slots = (Slot("prepare-0", "prepare"),)
    claim, start = decide(job(prepared=None), "worker-1", "box", slots, {}, 0.0)
    assert (claim.kind, start.after, start.first) == (Kind.PREPARE, Status.PREPARING, False)
    assert (start.reason, start.data) == ("box prepares the model", {"node": "box", "slot": "prepare-0"})
    # The preview's slot serves both halves of a preview.
    preview = (Slot("preview-0", "preview"),)
    assert [kind_of(job(prepared=there), preview) for there in (None, {})] == [Kind.PREPARE, Kind.PREVIEW]


def test_what_auto_has_come_to_goes_to_the_worker_and_into_the_event() -> None:
    opened = {"settled": {"rung": "lora"}, "adjusted": {"batch": 1}, "queue_key": "gpu"}
    claim, start = decide(job(), "worker-1", "box", GPUS[:1], opened, 0.0)
    assert (claim.settled, claim.adjusted) == ({"rung": "lora"}, {"batch": 1})
    assert start.data == {"node": "box", "slot": "GPU-a", "settled": {"rung": "lora"}, "adjusted": {"batch": 1}}
