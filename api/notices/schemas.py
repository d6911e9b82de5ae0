"""What the API says about webhooks, and what it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from api.fields import trimmed
from api.http.body import Body
from api.notices.render import Kind
from api.view import iso, view_of
from core.base.addresses import NotAllowed, parse
from core.base.attribute_docs import AttributeDocsModel
from core.db.tables import Delivery, Webhook
from core.jobs.base.deliveries import EVENTS, PIPELINE_EVENTS, SWEEP_EVENTS

EventName = Literal[
    "job.started",
    "job.paused",
    "job.succeeded",
    "job.failed",
    "job.cancelled",
    "pipeline.succeeded",
    "pipeline.failed",
    "pipeline.cancelled",
    "sweep.succeeded",
    "sweep.failed",
    "sweep.cancelled",
]
assert {*EVENTS.values(), *PIPELINE_EVENTS, *SWEEP_EVENTS} == set(get_args(EventName))


def _url(url: str) -> str:
    try:
        parse(url)
    except NotAllowed as error:
        raise ValueError(str(error)) from error
    return url


_ID, _MSG, _JOB = (f"{kind}-01kar3v8x5m2h6n9qst4wyz0bc" for kind in ("hook", "msg", "job"))
_NOW = "2026-11-21T09:20:55.004000Z"
WISH: dict[str, Any] = {"url": "https://ci.example.org/eft", "name": "ci", "events": ["job.succeeded", "job.failed"]}
WEBHOOK: dict[str, Any] = {
    "id": _ID,
    "name": "ci",
    "kind": "standard",
    "origin": "https://ci.example.org",
    "events": ["job.succeeded", "job.failed"],
    "all_jobs": True,
    "created_at": _NOW,
    "failing_since": None,
    "disabled_at": None,
    "disabled_reason": None,
}
SECRET: dict[str, Any] = {**WEBHOOK, "secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
DELIVERY: dict[str, Any] = {
    "id": _MSG,
    "type": "job.failed",
    "job": _JOB,
    "state": "pending",
    "attempts": 2,
    "created_at": _NOW,
    "next_at": "2026-11-21T09:25:55.004000Z",
    "last_at": _NOW,
    "last_status": 503,
    "last_error": "answered 503",
}


class WebhookWish(Body):
    url: Annotated[str, StringConstraints(min_length=1, max_length=2000), AfterValidator(_url)]
    """`http://` or `https://` at a public address (docs/notices.md). It is not shown again."""
    name: Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(trimmed)] = "webhook"
    """To tell webhooks apart."""
    kind: Kind = "standard"
    """standard: signed JSON after Standard Webhooks; chat: a line for Slack, Mattermost or Discord."""
    events: Annotated[list[EventName], Field(min_length=1, max_length=10)] = Field(["job.succeeded", "job.failed"])
    """What to tell of."""
    all_jobs: bool = True
    """False: only of jobs that name it in `notify`."""


class WebhookView(AttributeDocsModel):
    """Where notices go. Of its URL, only what is no secret."""

    model_config = ConfigDict(json_schema_extra={"examples": [WEBHOOK]})
    id: str
    name: str
    kind: str
    origin: str
    """Scheme, host and port of its URL; the rest may be a secret."""
    events: list[str]
    all_jobs: bool
    created_at: str
    failing_since: str | None
    """The first of the failures that no success has followed."""
    disabled_at: str | None
    """Nothing is sent any more since then."""
    disabled_reason: str | None


class SecretView(WebhookView):
    """With the secret that signs, this once."""

    model_config = ConfigDict(json_schema_extra={"examples": [SECRET]})
    secret: str | None
    """`whsec_…`; null for a chat, which checks no signature."""


class WebhookList(BaseModel):
    """The project's, oldest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"data": [WEBHOOK]}]})
    data: list[WebhookView]


class DeliveryView(AttributeDocsModel):
    """One notice for one webhook."""

    model_config = ConfigDict(json_schema_extra={"examples": [DELIVERY]})
    id: str
    """Sent as `webhook-id`, the same in every attempt."""
    type: str
    job: str | None
    state: str
    """pending, delivered, or dead: given up."""
    attempts: int
    created_at: str
    next_at: str | None
    """Time of the next attempt."""
    last_at: str | None
    last_status: int | None
    last_error: str | None


class DeliveryPage(AttributeDocsModel):
    """Newest first."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"data": [DELIVERY], "has_more": False, "next": None}]},
    )
    data: list[DeliveryView]
    has_more: bool
    next: str | None
    """Give it as `after` for the next page; null on the last one."""


def webhook_view(webhook: Webhook) -> dict[str, Any]:
    return view_of(WebhookView, webhook, origin=parse(webhook.url).origin)


def delivery_view(delivery: Delivery) -> dict[str, Any]:
    next_at = iso(delivery.next_at) if delivery.state == "pending" else None
    return view_of(DeliveryView, delivery, job=delivery.job_id, next_at=next_at)
