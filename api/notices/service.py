"""Looking after a project's webhooks. Inside the caller's transaction; each change is audited, without its secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from api.auth.policy import Principal
from api.notices.render import new_secret, valid
from api.notices.schemas import WebhookWish
from core.base.addresses import parse
from core.db.engine import db_now, read_now
from core.db.tables import Delivery, Project, Webhook
from core.errors import Conflict, NotFound
from core.ids import new_id
from core.jobs.base import deliveries as notices
from core.jobs.base.paging import ResultPage, UnknownCursor
from core.jobs.base.transitions import Actor
from core.jobs.policies import audit

MOST = 20
"""Webhooks of one project."""
MOST_SECRETS = 3
"""That sign at the same time."""


def require_room(session: Session, principal: Principal) -> None:
    """Raises Conflict when the project has MOST already."""
    count = session.execute(select(func.count()).where(Webhook.project_id == principal.project_id)).scalar_one()
    if count >= MOST:
        raise Conflict(f"a project has at most {MOST} webhooks; delete one", code="too_many")


def create(session: Session, principal: Principal, wish: WebhookWish) -> tuple[Webhook, str | None]:
    """With its secret. Raises Conflict when the project has MOST already."""
    session.execute(select(Project.id).where(Project.id == principal.project_id).with_for_update())  # one at a time
    require_room(session, principal)
    secret = new_secret() if wish.kind == "standard" else None
    webhook = Webhook(
        id=new_id("hook"),
        owner_id=principal.user_id,
        project_id=principal.project_id,
        name=wish.name,
        kind=wish.kind,
        url=wish.url,
        events=list(dict.fromkeys(wish.events)),
        all_jobs=wish.all_jobs,
        secrets=[] if secret is None else [{"secret": secret, "until": None}],
    )
    session.add(webhook)
    session.flush()
    session.refresh(webhook)
    told = {"name": wish.name, "kind": wish.kind, "origin": parse(wish.url).origin, "events": webhook.events}
    audit.record(session, principal, "webhook.create", webhook.id, told)
    return webhook, secret


def listed(session: Session, actor: Actor) -> Sequence[Webhook]:
    return (
        session.execute(select(Webhook).where(Webhook.project_id == actor.project_id).order_by(Webhook.id))
        .scalars()
        .all()
    )


def find(
    session: Session, actor: Actor, webhook_id: str, *, lock: Literal["change", "delete"] | None = None
) -> Webhook:
    """Raises NotFound for another project's, as for none. Changes of jobs do not wait for a lock to `change`."""
    query = select(Webhook).where(Webhook.id == webhook_id, Webhook.project_id == actor.project_id)
    if lock is not None:
        query = query.with_for_update(key_share=lock == "change")
    webhook = session.execute(query).scalar_one_or_none()
    if webhook is None:
        raise missing(webhook_id)
    return webhook


def missing(webhook_id: str) -> NotFound:
    return NotFound(f"there is no webhook `{webhook_id[:60]}` in this project", field="webhook_id")


def unknown(session: Session, actor: Actor, webhook_ids: Sequence[str]) -> list[str]:
    """Those of them that the project does not have."""
    if not webhook_ids:
        return []
    query = select(Webhook.id).where(Webhook.id.in_(webhook_ids), Webhook.project_id == actor.project_id)
    known = set(session.execute(query).scalars())
    return [webhook_id for webhook_id in webhook_ids if webhook_id not in known]


def remove(session: Session, principal: Principal, webhook_id: str) -> Webhook:
    """With all that was and is to be delivered to it."""
    webhook = find(session, principal, webhook_id, lock="delete")
    session.execute(delete(Delivery).where(Delivery.webhook_id == webhook_id))
    session.delete(webhook)
    audit.record(session, principal, "webhook.delete", webhook_id, {"name": webhook.name})
    return webhook


def rotate(session: Session, principal: Principal, webhook_id: str, overlap_seconds: float) -> tuple[Webhook, str]:
    """A new secret; the others sign as well for `overlap_seconds` more. Raises Conflict for a chat."""
    webhook = find(session, principal, webhook_id, lock="change")
    if webhook.kind == "chat":
        raise Conflict("a chat checks no signature; make a new webhook there if its URL has leaked", code="no_secret")
    now = read_now(session)
    secret, ends = new_secret(), now + overlap_seconds
    before = [
        {"secret": one["secret"], "until": ends if one["until"] is None else min(one["until"], ends)}
        for one in webhook.secrets
        if overlap_seconds > 0 and one["secret"] in valid(webhook.secrets, now)
    ]
    webhook.secrets = [{"secret": secret, "until": None}, *before][:MOST_SECRETS]
    audit.record(session, principal, "webhook.rotate", webhook_id, {"old_secret_ends_at": ends})
    return webhook, secret


def enable(session: Session, principal: Principal, webhook_id: str) -> Webhook:
    """Asking twice is fine. Dead letters stay until they are sent again."""
    webhook = find(session, principal, webhook_id, lock="change")
    if webhook.disabled_at is not None:
        webhook.disabled_at = webhook.disabled_reason = webhook.failing_since = None
        audit.record(session, principal, "webhook.enable", webhook_id)
    return webhook


def test(session: Session, principal: Principal, webhook_id: str) -> Delivery:
    """Raises Conflict for one that is disabled."""
    webhook = _enabled(find(session, principal, webhook_id, lock="change"))
    data = {"webhook": webhook_id, "name": webhook.name}
    delivery_id = notices.write(session, principal.user_id, principal.project_id, webhook_id, notices.TEST, data)
    audit.record(session, principal, "webhook.test", webhook_id)
    return session.get_one(Delivery, delivery_id)


def deliveries(
    session: Session, actor: Actor, webhook_id: str, *, state: str | None, after: str | None, limit: int
) -> ResultPage[Delivery]:
    """Newest first. Raises NotFound, UnknownCursor."""
    find(session, actor, webhook_id)
    query = select(Delivery).where(Delivery.webhook_id == webhook_id)
    if state is not None:
        query = query.where(Delivery.state == state)
    if after is not None:
        if session.execute(query.where(Delivery.id == after)).one_or_none() is None:
            raise UnknownCursor("`after` is not the id of a delivery in this list", field="after")
        query = query.where(Delivery.id < after)
    rows = session.execute(query.order_by(Delivery.id.desc()).limit(limit + 1)).scalars().all()
    return ResultPage(list(rows[:limit]), len(rows) > limit)


def resend(session: Session, principal: Principal, webhook_id: str, delivery_id: str) -> Delivery:
    """From the first attempt on, under the same id. One that waits is tried now. Raises NotFound, Conflict."""
    webhook = _enabled(find(session, principal, webhook_id, lock="change"))
    again = session.execute(
        update(Delivery)
        .where(Delivery.id == delivery_id, Delivery.webhook_id == webhook.id)
        .values(state="pending", attempts=0, next_at=db_now(), last_error=None, last_status=None)
        .returning(Delivery.id)
    ).one_or_none()
    if again is None:
        raise NotFound(f"there is no delivery `{delivery_id[:60]}` of this webhook", field="delivery_id")
    audit.record(session, principal, "webhook.resend", webhook_id, {"delivery": delivery_id})
    return session.execute(
        select(Delivery).where(Delivery.id == delivery_id).execution_options(populate_existing=True)
    ).scalar_one()


def _enabled(webhook: Webhook) -> Webhook:
    if webhook.disabled_at is not None:
        words = f"this webhook is disabled: {webhook.disabled_reason}; `POST /webhooks/{{id}}/enable` enables it"
        raise Conflict(words, code="webhook_disabled")
    return webhook
