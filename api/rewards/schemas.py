"""What `/rewards` answers."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from api.view import iso
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Job

EXAMPLE_ID = "trial-01kar3v8x5m2h6n9qst4wyz0bd"
_SPREAD: dict[str, Any] = {
    "mean": 0.25,
    "std": 0.43,
    "histogram": [{"from": 0.0, "to": 0.0, "answers": 192}, {"from": 1.0, "to": 1.0, "answers": 64}],
}
_RESULT: dict[str, Any] = {
    "prompts": 32, "answers": 256, "reward": _SPREAD, "rewards": {"number": _SPREAD},
    "groups_alike": 6, "share_alike": 0.1875, "truncated": 0.02,
    "tokens": {"prompt": 21.4, "answer": 11.9, "longest_answer": 24},
    "step": {"prompts": 4, "answers": 32, "tokens": 381.0, "rollout_seconds": 2.1, "train_seconds": 1.4},
    "examples": [
        {
            "line": 7, "prompt": "What is 3 + 4?", "answer": "7", "rewards": {"number": 1.0}, "reward": 1.0,
            "finished": True,
        }
    ],
}  # fmt: skip
_TRIAL: dict[str, Any] = {
    "id": EXAMPLE_ID,
    "status": "succeeded",
    "reason": "finished",
    "created_at": "2026-11-23T09:20:55.004000Z",
    "finished_at": "2026-11-23T09:21:31.120000Z",
    "progress": {"prompts": 32, "total_prompts": 32},
    "result": _RESULT,
    "failure": None,
    "links": {"self": f"/rewards/try/{EXAMPLE_ID}"},
}
SPEC: dict[str, Any] = {
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data": "file-01kar3v8x5m2h6n9qst4wyz0bc",
    "method": "lora",
    "stage": {"type": "grpo", "max_completion_length": 24, "reward": ["number"]},
    "training": {"per_device_train_batch_size": 32, "max_length": 128},
}


class TrialView(AttributeDocsModel):
    """What answers of the untrained model are rewarded with."""

    model_config = ConfigDict(json_schema_extra={"examples": [_TRIAL]})
    id: str
    status: str
    """As a job's: queued, preparing, starting, running; and final: succeeded, failed, cancelled."""
    reason: str
    created_at: str
    finished_at: str | None
    progress: dict[str, Any] | None
    """Prompts answered so far: prompts, of total_prompts."""
    result: dict[str, Any] | None
    """Once it has succeeded (docs/rollouts.md). Above a `share_alike` of 0.9 a submit of the job is refused unless
    `stage.force` is set."""
    failure: dict[str, Any] | None
    """Once it has failed: class, code, message, field."""
    links: dict[str, str]


def trial_view(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "status": job.status,
        "reason": job.reason,
        "created_at": iso(job.created_at),
        "finished_at": iso(job.finished_at),
        "progress": job.progress,
        "result": job.result,
        "failure": job.failure,
        "links": {"self": f"/rewards/try/{job.id}"},
    }
