"""Deliveries in the database: which are due, and what became of an attempt. Inside the caller's transaction."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, text, update
from sqlalchemy.orm import Session

from core.base.post import HttpReply
from core.db.engine import db_now, read_now
from core.db.tables import Delivery, Webhook
from core.jobs.policies import audit

DAY = 86400.0
PENDING = text("webhook_deliveries.state = 'pending'")
"""In words, not bound: SQLite takes a partial index only for a query in whose words it sees that it may."""
SPREAD = 0.2
"""A wait is longer or shorter by up to this part of it, so that what failed together does not come back together."""
MOST_WAIT = DAY
"""That a target may ask for."""


@dataclass(frozen=True, slots=True)
class Due:
    delivery: Delivery
    webhook: Webhook


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """The schedule."""

    waits: Sequence[float]
    """Seconds before the second attempt, the third, …"""
    disable_seconds: float


def due(session: Session, busy: Collection[str], limit: int) -> list[Due]:
    """The next delivery of each webhook that has one and is not `busy`: one that is slow or has many holds up none."""
    waiting = (
        select(Delivery.webhook_id, func.min(Delivery.next_at).label("first"))
        .where(PENDING, Delivery.next_at <= db_now())
        .group_by(Delivery.webhook_id)
        .order_by("first")
        .limit(limit + len(busy))
    )
    hooks = [row.webhook_id for row in session.execute(waiting) if row.webhook_id not in busy][:limit]
    found = []
    for hook in hooks:
        row = session.execute(
            select(Delivery, Webhook)
            .join(Webhook, Webhook.id == Delivery.webhook_id)
            .where(Delivery.webhook_id == hook, PENDING, Delivery.next_at <= db_now())
            .order_by(Delivery.next_at, Delivery.id)
            .limit(1)
        ).one_or_none()
        if row is not None:
            found.append(Due(row[0], row[1]))
    return found


def settle(session: Session, sent: Due, answer: HttpReply, patience: RetrySchedule) -> None:
    """Write down what became of an attempt, unless somebody else has by now."""
    delivery, attempts = sent.delivery, sent.delivery.attempts + 1
    hook = session.execute(
        select(Webhook, db_now()).where(Webhook.id == sent.webhook.id).with_for_update(key_share=True)
    ).one_or_none()  # first, as whoever sends again does: nobody waits in a circle
    if hook is None:
        return
    final = answer.status == 410 or attempts > len(patience.waits)
    values: dict[str, object] = {"state": "delivered" if answer.taken else "dead" if final else "pending"}
    if values["state"] == "pending":
        wait = patience.waits[attempts - 1] * random.uniform(1 - SPREAD, 1 + SPREAD)  # noqa: S311 -- no secret
        values["next_at"] = db_now() + max(wait, min(answer.retry_after or 0.0, MOST_WAIT))
    taken = session.execute(
        update(Delivery)
        .where(Delivery.id == delivery.id, PENDING, Delivery.attempts == delivery.attempts)
        .values(**values, attempts=attempts, last_at=db_now(), last_status=answer.status, last_error=answer.error)
        .returning(Delivery.id)
        .execution_options(synchronize_session=False)
    ).one_or_none()
    if taken is None:
        return  # deleted, or sent twice: a new leader began before this one noticed
    webhook, now = hook[0], float(hook[1])
    if answer.taken:
        webhook.failing_since = None
        return
    webhook.failing_since = webhook.failing_since or now
    if answer.status == 410:
        disable(session, webhook, "it answered 410 Gone: its receiver wants no more notices")
    elif now - webhook.failing_since >= patience.disable_seconds:
        days = (now - webhook.failing_since) / DAY
        disable(session, webhook, f"it has only failed for {days:.1f} days, lastly: {answer.error}")


def disable(session: Session, webhook: Webhook, why: str) -> None:
    """Nothing is sent there any more; what waited becomes dead letters, which can be sent again once it is enabled."""
    if webhook.disabled_at is not None:
        return
    webhook.disabled_at, webhook.disabled_reason = read_now(session), why
    told = {"name": webhook.name, "reason": why}
    audit.record(session, None, "webhook.disable", webhook.id, told, project_id=webhook.project_id)
    session.execute(
        update(Delivery)
        .where(Delivery.webhook_id == webhook.id, PENDING)
        .values(state="dead", last_error=f"the webhook was disabled: {why}")
        .execution_options(synchronize_session=False)
    )


def forget(session: Session, seconds: float, limit: int = 1000) -> int:
    """Delete what was delivered or given up and is older than that. How many went: ask again while it is `limit`."""
    old = select(Delivery.id).where(Delivery.state != "pending", Delivery.created_at < db_now() - seconds).limit(limit)
    gone = session.execute(delete(Delivery).where(Delivery.id.in_(old)).returning(Delivery.id))
    return len(gone.all())
