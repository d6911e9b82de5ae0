"""`after` of a job: what people call the jobs that it waits for."""

from __future__ import annotations

from sqlalchemy.orm import Session

from core.errors import Fault, NotFound
from core.jobs.admission import dependencies
from core.jobs.base.transitions import Actor
from core.jobs.views import handles
from core.spec.job import After, JobSpec


def settled(session: Session, actor: Actor, spec: JobSpec) -> JobSpec:
    """The spec with the ids of these jobs.

    Raises SpecError where one does not exist, is named twice, or has ended so that this job would never start; Conflict
    where a name means several.
    """
    found: dict[str, After] = {}
    for number, one in enumerate(spec.after):
        field = f"after.{number}.job"
        try:
            job_id = handles.resolve(session, actor, handles.JOB, one.job)
        except NotFound as error:
            words = f"{error.message}; a job can only wait for jobs that have been submitted"
            raise dependencies.refused(Fault("after_not_found", words, field)) from error
        if job_id in found:
            raise dependencies.refused(Fault("after_twice", f"`{job_id}` is named twice", field))
        found[job_id] = one.model_copy(update={"job": job_id})
    if not found:
        return spec
    dependencies.states(session, actor.project_id, list(found.values()))
    return spec.model_copy(update={"after": list(found.values())})
