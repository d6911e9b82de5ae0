"""`checkpoint.resume_from` of a job: what people call the checkpoint that it begins with."""

from __future__ import annotations

from sqlalchemy.orm import Session

from core.errors import Fault, SpecError
from core.jobs.admission import branches, checkpoints
from core.jobs.base.transitions import Actor
from core.jobs.views import handles
from core.settings import Settings
from core.spec.axes.runtime import ResumeFrom
from core.spec.job import JobSpec
from core.storage.open import open_store

FIELD = branches.FIELD


def settled(session: Session, actor: Actor, spec: JobSpec, settings: Settings) -> JobSpec:
    """The spec with the id of the checkpoint and the hash of its manifest.

    Raises NotFound where there is no such job or checkpoint, Conflict where its job has not ended or a name means
    several, SpecError where the hash is another.
    """
    asked = spec.checkpoint.resume_from
    if asked is None:
        return spec
    job_id = handles.resolve(session, actor, handles.JOB, asked.job, field=f"{FIELD}.job")
    branches.before(session, actor.project_id, job_id)
    store = open_store(settings)
    found = checkpoints.choose(checkpoints.of_job(store, job_id), str(asked.checkpoint), job_id, f"{FIELD}.checkpoint")
    sha256 = checkpoints.sha256_of_manifest(store, found)
    if asked.sha256 not in (None, sha256):
        words = f"`{found.id}` of `{job_id}` is another checkpoint than the one with this hash; remove the field"
        fault = Fault("checkpoint_mismatch", words, f"{FIELD}.sha256")
        raise SpecError(f"{fault.field}: {words}", field=fault.field, faults=(fault,), code=fault.code)
    named = ResumeFrom(job=job_id, checkpoint=found.id, sha256=sha256)
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"resume_from": named})})


def check(session: Session, actor: Actor, spec: JobSpec) -> None:
    """Raises SpecError where the resolved job differs from the one before in what a checkpoint cannot do without."""
    if (asked := spec.checkpoint.resume_from) is not None:
        branches.check(branches.before(session, actor.project_id, asked.job), spec)
