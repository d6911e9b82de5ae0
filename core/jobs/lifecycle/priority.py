"""Another priority for a job that has been submitted: its place in the order changes, and nothing else."""

from __future__ import annotations

from sqlalchemy.orm import Session

from core.db.engine import read_now
from core.db.tables import Job
from core.errors import Conflict
from core.jobs.base import outbox
from core.jobs.base.slots import Key
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor, append_events
from core.jobs.lifecycle.submit import find
from core.jobs.policies import audit, quotas


def change(session: Session, actor: Actor, job_id: str, priority: int) -> Job:
    """Set it, with an event and an entry in the audit. What runs goes on; a waiting job has its new place at once, any
    other when it waits again. Asking for the priority that it has changes nothing.

    Raises SpecError for one above the project's limit, Conflict for a job that has ended, NotFound.
    """
    job = find(session, actor, job_id, lock=True)
    if Status(job.status) in FINAL:
        raise Conflict(f"the job has already {job.status}; it no longer waits", code="already_final")
    if priority == job.priority:
        return job
    quotas.check_priority(session, actor.project_id, priority)
    before = job.priority
    key = Key.parse(job.queue_key)
    told = {"from": before, "to": priority}
    data = {**told, "actor": actor.user_id, "request_id": actor.request_id}
    values = {"priority": priority, "queue_key": str(Key(key.needs, key.project_id, key.owner_id, priority))}
    values |= {"reserved_at": None, "reserved_node": None}  # it had come to its turn among others
    now = read_now(session)
    append_events(session, job, [], [("priority", now, data)], values)
    audit.record(session, actor, "job.priority", job_id, told)
    if job.status == Status.QUEUED.value:
        outbox.ring(session, job_id)
    session.refresh(job)
    return job
