"""Deleting a checkpoint: it leaves the list in one step, and its bytes go after that."""

from __future__ import annotations

from typing import Any

from core.db.engine import Database
from core.errors import Conflict
from core.jobs.admission import branches, checkpoints
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import retention
from core.jobs.lifecycle.submit import find
from core.jobs.policies import audit
from core.removal import removing
from core.settings import Settings
from core.storage.layout import Layout
from core.storage.store import Store


def delete(
    database: Database, settings: Settings, layout: Layout, store: Store, actor: Actor, job_id: str, handle: str
) -> dict[str, Any]:
    """Raises NotFound, and Conflict while the job, or one that may go on from it, has not ended."""
    with removing(retention.ASIDE) as set_aside, database.write() as session:
        job = find(session, actor, job_id, lock=True)
        if Status(job.status) not in FINAL:
            words = (
                f"the job is {job.status}, and its trainer looks after its checkpoints: wait for its end, or cancel it"
            )
            raise Conflict(words, field="job_id", code="not_ended")
        if (needed := branches.needed_by(session, job)) is not None:
            words = f"`{needed}` may continue from checkpoints of this job: wait for its end, or cancel it"
            raise Conflict(words, field="job_id", code="job_in_use")
        found = checkpoints.choose(checkpoints.of_job(store, job_id), handle, job_id, "checkpoint_id", damaged=True)
        audit.record(session, actor, "checkpoint.delete", job_id, {"checkpoint": found.id, "bytes": found.bytes})
        if not settings.is_remote:
            set_aside(layout.root / found.key)
    if settings.is_remote:
        store.discard(found.key)
    return {"id": found.id, "deleted": True, "freed_bytes": found.bytes}
