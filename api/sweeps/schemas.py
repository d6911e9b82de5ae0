"""What the API says about sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from api.jobs.schemas import SPEC_LONG
from api.view import view_of
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Job, SweepRow
from core.jobs.lifecycle.sweeps import records

_SWEEP, _JOB = "sweep-01kar3v8x5m2h6n9qst4wyz0bc", "job-01kar3v8x5m2h6n9qst4wyz0bc"
_FILE = "file-01kar3v8x5m2h6n9qst4wyz0bc"
_NOW = "2026-11-21T09:20:55.004000Z"
EXAMPLE: dict[str, Any] = {
    "name": "rates",
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "data": {"train": _FILE, "split": {"eval_fraction": 0.1}},
    "sweep": {"optimizer.learning_rate": [1e-4, 2e-4], "method.r": [8, 16]},
}
_POINT: dict[str, Any] = {"optimizer.learning_rate": 1e-4, "method.r": 8}
_RUN: dict[str, Any] = {
    "job": _JOB,
    "name": "rates-1",
    "status": "succeeded",
    "reason": "finished",
    "point": _POINT,
    "value": 1.92,
    "best": True,
}
_SPEC = {"type": "grid", "fields": EXAMPLE["sweep"], "metric": "eval_loss", "goal": "min", "halving": None}
VIEW: dict[str, Any] = {
    "id": _SWEEP,
    "name": "rates",
    "status": "succeeded",
    "reason": f"4 of 4 runs succeeded; best: `{_JOB}` with eval_loss 1.92",
    "sweep": _SPEC,
    "best": _JOB,
    "runs": [_RUN],
    "comparisons": [],
    "created_at": _NOW,
    "finished_at": _NOW,
    "links": {"self": f"/sweeps/{_SWEEP}"},
}


class SweepRunView(AttributeDocsModel):
    """One run of a sweep: an ordinary job."""

    job: str
    name: str | None
    status: str
    reason: str
    point: dict[str, Any]
    """Fields in which it differs from the other runs, with their values."""
    value: float | None
    """The metric of its result; null until it has succeeded."""
    best: bool
    """Whether it has the best value so far."""


class SweepView(AttributeDocsModel):
    """A sweep as it is now."""

    model_config = ConfigDict(json_schema_extra={"examples": [VIEW]})
    id: str
    name: str | None
    status: str
    """running; and final: succeeded (a run has), failed, cancelled."""
    reason: str
    """How far it is, for people."""
    sweep: dict[str, Any]
    """As submitted, with the metric written out."""
    best: str | None
    """The job with the best value so far."""
    runs: list[SweepRunView]
    """In the order of their points."""
    comparisons: list[dict[str, Any]]
    """Early comparisons: `step`, `values` by job, and the jobs that were `stopped`."""
    created_at: str
    finished_at: str | None
    links: dict[str, str]


class SweepPage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [VIEW], "has_more": False, "next": None}]},
    )
    data: list[SweepView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


class SweepDeleted(BaseModel):
    """The sweep is gone; its jobs are still there."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": _SWEEP, "deleted": True}]})
    id: str
    deleted: bool


class SweepDryRun(AttributeDocsModel):
    """What would run; nothing was stored."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "dry_run": True,
                    "runs": 4,
                    "sweep": _SPEC,
                    "points": [_POINT],
                    "first": SPEC_LONG,
                    "plan": None,
                    "plan_reason": "this model was never prepared here",
                }
            ]
        },
    )
    dry_run: bool
    runs: int
    """How many jobs it would submit."""
    sweep: dict[str, Any]
    points: list[dict[str, Any]]
    """Fields and values of each."""
    first: dict[str, Any]
    """The first run's resolved job."""
    plan: dict[str, Any] | None
    """What the first run would take here, by an estimate; null: that is not known."""
    plan_reason: str


def sweep_view(sweep: SweepRow, jobs: Sequence[Job]) -> dict[str, Any]:
    best = records.best_of(sweep, jobs)
    runs = [
        {
            "job": job.id,
            "name": job.name,
            "status": job.status,
            "reason": job.reason,
            "point": job.sweep_point,
            "value": records.value_of(sweep, job),
            "best": job.id == best,
        }
        for job in jobs
    ]
    return view_of(
        SweepView,
        sweep,
        sweep=sweep.spec,
        best=best,
        runs=runs,
        comparisons=sweep.rungs,
        links={"self": f"/sweeps/{sweep.id}"},
    )
