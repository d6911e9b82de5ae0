"""Exports asked for later: rows of `jobs` that write formats of a model that is in the registry. Claims, leases and
events are those of any job; the slot has no GPU. People see them below their model, never among the jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from core.db.tables import Artifact, Job
from core.errors import Conflict, NotFound, SpecError
from core.jobs.admission import parents
from core.jobs.admission.auto_method import effective
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.submit import submit
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits
from core.plan.compatibility import check
from core.spec.axes.batching import Rows
from core.spec.axes.export import Export, about
from core.spec.axes.method import Adapter
from core.spec.axes.model import JobModel, UseOfAdapter
from core.spec.axes.runtime import DiskCheckpoints, Resident, SingleDevice
from core.spec.job import JobSpec
from core.spec.resolve import resolve

KIND = "export"


def spec_of(job: Job, exports: Sequence[Export], max_runtime_seconds: int | None = None) -> JobSpec:
    """The job of an export: the rows, stage and method of the job that made the model, on a CPU, with `exports`.
    Raises SpecError for a format that the model cannot have."""
    if job.kind == "upload":
        words = (
            "this model was uploaded, and formats are held against the rows that a job has trained on: train it "
            "further (`model: {type: registry, id: …}`) with `export`"
        )
        raise SpecError(words, field="export", code="export_without_rows")
    trained = effective(job.spec, job.settled, job.adjusted or {})
    adapter: UseOfAdapter = "continue" if isinstance(trained.method, Adapter) else None
    # The arithmetic of the training, where a CPU has it.
    precision = "auto" if trained.training.precision == "fp8" else trained.training.precision
    training = trained.training.model_copy(update={"precision": precision, "attention": "auto"})
    changed: dict[str, Any] = {
        "model": JobModel(id=job.id, adapter=adapter),
        "method": trained.method.handed_back() if isinstance(trained.method, Adapter) else trained.method,
        "export": list(exports),
        "priority": 0,
        "training": training,
        "batching": Rows(),
        "memory": Resident(),
        "checkpoint": DiskCheckpoints(),
        "resources": SingleDevice(accelerator="cpu", max_runtime_seconds=max_runtime_seconds),
        "notify": [],
        "tracking": [],
        "after": [],
        "tags": [],
        "note": "",
    }
    spec = resolve(trained.model_copy(update=changed))
    if faults := check(spec):
        first = faults[0]
        raise SpecError(f"{first.field}: {first.message}", field=first.field, faults=faults, code=first.code)
    return spec


def ask(
    session: Session,
    actor: Actor,
    job: Job,
    exports: Sequence[Export],
    bounds: VolumeLimits = NO_BOUNDS,
    *,
    max_runtime_seconds: int | None = None,
) -> Job:
    """Queue an export of a job's model; it fails if it is not over within `max_runtime_seconds`. Raises Conflict for a
    format that is there or on its way, SpecError for one that the model cannot have and where the weights are gone,
    QueueFull and SpecsFull beyond `bounds`."""
    spec = spec_of(job, exports, max_runtime_seconds)
    chain = parents.pin_export(session, job)
    there = {one["folder"] for one in outcomes(session, job) if one["released"]}
    for known in session.execute(_of_job(job).where(Job.status.not_in([one.value for one in FINAL]))).scalars():
        there |= {about(item).folder for item in JobSpec.model_validate(known.spec).export}
    for item in exports:
        if (name := about(item).folder) in there:
            words = f"`{name}` of this model is there already, or on its way: `GET /models/{{id}}` lists the formats"
            raise Conflict(words, field="export", code="exported_already")
    return submit(session, actor, spec, kind="export", chain=chain, bounds=bounds)


def find(session: Session, job: Job, export_id: str) -> Job:
    """Raises NotFound for one of another model as for none."""
    row = session.execute(_of_job(job).where(Job.id == export_id)).scalar_one_or_none()
    if row is None:
        words = f"there is no export `{export_id[:60]}` of this model; `GET /models/{{id}}/exports` lists them"
        raise NotFound(words, field="export_id")
    return row


def of_job(session: Session, job: Job) -> Sequence[Job]:
    """All exports of a job's model, oldest first."""
    return session.execute(_of_job(job)).scalars().all()


def outcomes(session: Session, job: Job) -> list[dict[str, Any]]:
    """What became of each format, those of the job itself first. A later try of a format replaces an earlier one."""
    found: dict[str, dict[str, Any]] = {}
    for one in [job, *of_job(session, job)]:
        for outcome in (one.result or {}).get("export") or []:
            found.pop(outcome["folder"], None)
            found[outcome["folder"]] = outcome
    return list(found.values())


def artifacts(session: Session, job: Job) -> dict[str, Artifact]:
    """Files of the model by their paths: of the job's folders, and of its exports."""
    ids = [job.id, *(one.id for one in of_job(session, job) if one.status == Status.SUCCEEDED.value)]
    query = select(Artifact).where(Artifact.job_id.in_(ids), Artifact.path.contains("/"))
    rows = sorted(session.execute(query).scalars(), key=lambda row: (row.path, ids.index(row.job_id)))
    return {row.path: row for row in rows}


def _of_job(job: Job) -> Select[Job]:
    return (
        select(Job)
        .where(
            Job.project_id == job.project_id,
            Job.kind == KIND,
            Job.spec["model"]["id"].as_string() == job.id,
        )
        .order_by(Job.id)
    )
