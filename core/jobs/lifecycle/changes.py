"""What may change of a job that has been submitted: its priority, and what people say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import update
from sqlalchemy.orm import Session

from core.db.engine import db_now, read_now
from core.db.tables import Job
from core.errors import Conflict
from core.jobs.base import outbox
from core.jobs.base.slots import Key
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor, append_events
from core.jobs.lifecycle.submit import find
from core.jobs.policies import audit, quotas


@dataclass(frozen=True, slots=True)
class Labels:
    """New labels of a job; None: as before."""

    tags: Sequence[str] | None = None
    note: str | None = None
    """"" removes it."""
    archived: bool | None = None


def label(session: Session, actor: Actor, job_id: str, labels: Labels) -> Job:
    """Change tags, note and archive of a job in any state, with an entry in the audit; nothing else of it changes.

    Raises NotFound, and Conflict where a job that has not ended is to be archived.
    """
    job = find(session, actor, job_id, lock=True)
    values: dict[str, object] = {}
    if labels.tags is not None and list(labels.tags) != job.tags:
        values["tags"] = list(labels.tags)
        audit.record(session, actor, "job.tags", job_id, {"from": job.tags, "to": list(labels.tags)})
    if labels.note is not None and (labels.note or None) != job.note:
        values["note"] = labels.note or None
        audit.record(session, actor, "job.note", job_id, {"characters": len(labels.note)})
    if labels.archived is not None and labels.archived is not (job.archived_at is not None):
        if labels.archived and Status(job.status) not in FINAL:
            words = f"the job is {job.status}; only an ended job can be archived: cancel it, or wait for its end"
            raise Conflict(words, field="archived", code="not_ended")
        values["archived_at"] = db_now() if labels.archived else None
        audit.record(session, actor, "job.archive", job_id, {"archived": labels.archived})
    if values:
        session.execute(
            update(Job).where(Job.id == job_id).values(**values).execution_options(synchronize_session=False)
        )
        session.refresh(job)
    return job


def prioritise(session: Session, actor: Actor, job_id: str, priority: int) -> Job:
    """Set the priority, with an event and an entry in the audit. What runs goes on; a waiting job has its new place at
    once, any other when it waits again. Asking for the priority that it has changes nothing.

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
