"""A job that begins with a checkpoint of another one (`checkpoint.resume_from`): what it may change, and to what it is
pinned."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Text, cast, select
from sqlalchemy.orm import Session

from core.db.tables import Job
from core.errors import Conflict, Fault, NotFound, SpecError
from core.jobs.admission import lineage
from core.jobs.admission.auto_method import effective
from core.jobs.base.states import FINAL, Status
from core.spec.axes.method import Auto
from core.spec.differences import differences
from core.spec.job import JobSpec

FIELD = "checkpoint.resume_from"
KEPT = {
    "model": "the weights of a checkpoint are those of its model",
    "method": "a checkpoint holds what its method trains",
    "quantization": "an adapter is trained over one format of the frozen weights",
    "optimizer": "a checkpoint holds the optimizer's state; of its fields only `learning_rate` may change",
    "stage.type": "figures and heads of another stage are others",
    "training.precision": "weights and loss scale depend on the precision",
    "resources.gpus": "each rank has a part of a checkpoint of its own",
}
"""Fields that a job has in common with the one whose checkpoint it begins with, each with the reason."""
FREE = ("optimizer.learning_rate",)
UNSEEN = ("name", "tags", "note", "priority", "after", "notify", "checkpoint", "export")
"""Fields that change nothing of the training."""


def changed(before: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    """Dotted paths of the fields of training in which two resolved specs differ."""
    return [path for path in differences([before, spec]) if not _within(path, UNSEEN)]


def faults_of(before: JobSpec, spec: JobSpec) -> list[Fault]:
    """A fault for every field that differs and must not. Pure."""
    found = []
    for path in changed(before.model_dump(mode="json"), spec.model_dump(mode="json")):
        for field, why in KEPT.items():
            if _within(path, (field,)) and path not in FREE:
                words = f"it must be as in the job whose checkpoint it begins with: {why}; for another, start at step 0"
                found.append(Fault("branch_differs", words, path))
    return found


def _within(path: str, fields: tuple[str, ...]) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in fields)


def before(session: Session, project_id: str, job_id: str, *, lock: bool = False) -> Job:
    """The job whose checkpoint is named. Raises NotFound, and Conflict while it has not ended: its trainer removes
    checkpoints."""
    query = select(Job).where(Job.id == job_id, Job.project_id == project_id, Job.kind == "train")
    job = session.execute(query.with_for_update(read=True) if lock else query).scalar_one_or_none()
    if job is None:
        raise NotFound(f"there is no job `{job_id[:60]}` in this project", field=f"{FIELD}.job")
    if Status(job.status) not in FINAL:
        words = f"`{job_id}` is {job.status}, and its trainer may remove the checkpoint: cancel it, or wait for its end"
        raise Conflict(words, field=f"{FIELD}.job", code="not_ended")
    return job


def trained(job: Job) -> JobSpec:
    """The spec that a job trained with, as another one is compared with it: `method: auto` is what it came to."""
    return effective(job.spec, job.settled, {})


def check(job: Job, spec: JobSpec) -> None:
    """Raises SpecError, with a fault for every field in which `spec` may not differ from the job that it continues."""
    mine = spec if not isinstance(spec.method, Auto) or job.settled is None else trained_as(job, spec)
    if faults := faults_of(trained(job), mine):
        first, more = faults[0], f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SpecError(
            f"{first.field}: {first.message}{more}", field=first.field, faults=tuple(faults), code=first.code
        )


def trained_as(job: Job, spec: JobSpec) -> JobSpec:
    """`spec`, whose method is `auto`, with what that came to in the job before."""
    return effective(spec.model_dump(mode="json"), job.settled, {})


def pin(session: Session, project_id: str, spec: JobSpec) -> dict[str, Any]:
    """Columns of a job that begins with a checkpoint; empty where it begins at step 0. The job before cannot be deleted
    before the caller's transaction has ended. Raises as `before` and `check`."""
    asked = spec.checkpoint.resume_from
    if asked is None:
        return {}
    job = before(session, project_id, asked.job, lock=True)
    check(job, spec)
    mine = trained_as(job, spec) if isinstance(spec.method, Auto) and job.settled is not None else spec
    fields = changed(trained(job).model_dump(mode="json"), mine.model_dump(mode="json"))
    entry = {"job": job.id, "checkpoint": asked.checkpoint, "sha256": asked.sha256, "changed": fields}
    generation = {**lineage.entry(session, job), "checkpoint": asked.checkpoint}
    return {
        "resume_from": [entry],
        "chain": job.chain,
        "lineage": [generation, *(job.lineage or [])],
        "settled": job.settled if isinstance(spec.method, Auto) else None,
    }


def needed_by(session: Session, job: Job) -> str | None:
    """The newest job that has not ended and may go on from a checkpoint of this one."""
    query = select(Job.id).where(
        Job.project_id == job.project_id,
        Job.status.not_in([status.value for status in FINAL]),
        cast(Job.resume_from, Text).contains(job.id),
    )
    return session.execute(query.order_by(Job.id.desc()).limit(1)).scalar_one_or_none()
