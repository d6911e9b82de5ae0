"""Notices of what becomes of jobs: written with the change itself, so that none is lost and none is false.

What is written here is sent by the API (api/notices/sender.py), at least once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from core.db.tables import Delivery, Job, Webhook
from core.ids import new_id
from core.jobs.base.states import Status

EVENTS = {
    Status.RUNNING: "job.started",
    Status.PAUSED: "job.paused",
    Status.SUCCEEDED: "job.succeeded",
    Status.FAILED: "job.failed",
    Status.CANCELLED: "job.cancelled",
}
"""Events that webhooks receive. A retried job starts again."""
PIPELINE_EVENTS = ("pipeline.succeeded", "pipeline.failed", "pipeline.cancelled")
SWEEP_EVENTS = ("sweep.succeeded", "sweep.failed", "sweep.cancelled")
TEST = "webhook.test"


def tell(session: Session, job: Job, status: Status) -> None:
    """Write a notice for each webhook that wants to know that `job` has come to `status`."""
    kind = EVENTS.get(status)
    if kind is None:
        return
    hooks = session.execute(
        select(Webhook.id, Webhook.events, Webhook.all_jobs)
        .where(Webhook.project_id == job.project_id, Webhook.disabled_at.is_(None))
        .order_by(Webhook.id)
        .with_for_update(read=True, key_share=True)  # a webhook deleted meanwhile must not make the job's change fail
    ).all()
    if not hooks or job.kind != "train":
        return
    named = job.spec.get("notify", ())
    data = _about(job)
    for hook in hooks:
        if kind in hook.events and (hook.all_jobs or hook.id in named):
            write(session, job.owner_id, job.project_id, hook.id, kind, data, job_id=job.id)


def tell_end(
    session: Session, owner_id: str, project_id: str, kind: str, data: dict[str, Any], named: Sequence[str]
) -> None:
    """Write a notice for each webhook that wants to know of the end of a pipeline or sweep."""
    hooks = session.execute(
        select(Webhook.id, Webhook.events, Webhook.all_jobs)
        .where(Webhook.project_id == project_id, Webhook.disabled_at.is_(None))
        .order_by(Webhook.id)
        .with_for_update(read=True, key_share=True)
    ).all()
    for hook in hooks:
        if kind in hook.events and (hook.all_jobs or hook.id in named):
            write(session, owner_id, project_id, hook.id, kind, data)


def write(
    session: Session,
    owner_id: str,
    project_id: str,
    webhook_id: str,
    kind: str,
    data: dict[str, Any],
    *,
    job_id: str | None = None,
) -> str:
    """One delivery that is due at once; its id."""
    delivery_id = new_id("msg")
    session.execute(
        insert(Delivery).values(
            id=delivery_id,
            owner_id=owner_id,
            project_id=project_id,
            webhook_id=webhook_id,
            job_id=job_id,
            type=kind,
            data=data,
        )
    )
    return delivery_id


def _about(job: Job) -> dict[str, Any]:
    """What leaves the box: no rows, no spec, no paths of the data root."""
    failure = job.failure or {}
    return {
        "id": job.id,
        "name": job.name,
        "project_id": job.project_id,
        "status": job.status,
        "reason": job.reason,
        "attempt": job.attempt,
        "failure": {"class": failure.get("class"), "code": failure.get("code")} if job.failure else None,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
    }
