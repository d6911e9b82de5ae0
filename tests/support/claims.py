"""A claim as a worker gets it, for tests of what a worker does with one."""

from __future__ import annotations

from core.jobs.base.transitions import Token
from core.jobs.lifecycle.claims import Claim, Slot
from core.spec.job import JobSpec
from core.spec.resolve import resolve


def claim_of(job_id: str, attempt: int) -> Claim:
    """An attempt at training on a slot of a CPU, with nothing to resume from that the database knows of."""
    spec = resolve(JobSpec.model_validate({"model": "team/tiny", "data": "file-01kar3v8x5m2h6n9qst4wyz0bc"}))
    return Claim(
        token=Token(job_id, attempt, "wrk-1"), kind="train", slots=(Slot("cpu", "cpu"),), owner_id="u", project_id="p",
        spec=spec.model_dump(mode="json"), prepared=None, resume_from=[], adjusted={}, settled=None,
        spent_seconds=0.0, chain=None, lineage=None, reward_models=None, request_id=None,
    )  # fmt: skip
