"""`/webhooks`: where a project wants to be told of its jobs, and what became of each notice."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth.policy import Managing, Principal, Reading
from api.deps import After, App, AppState, Limit
from api.errors import printable
from api.handles import WebhookId
from api.http.body import json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, Once, answer, earlier
from api.notices import schemas, service
from core.errors import NotFound

router = APIRouter(tags=["webhooks"])
NO_STORE = {"cache-control": "no-store"}

_DELIVERY_ID = re.compile(r"msg-[0-9a-z]{26}")


async def _delivery_id(
    delivery_id: Annotated[str, Path(description="Id of a delivery.", examples=["msg-01kar3v8x5m2h6n9qst4wyz0bc"])],
) -> str:
    if not _DELIVERY_ID.fullmatch(delivery_id):
        raise NotFound(f"there is no delivery `{printable(delivery_id)}` of this webhook", field="delivery_id")
    return delivery_id


DeliveryId = Annotated[str, Depends(_delivery_id)]


@router.get(
    "/webhooks",
    summary="List webhooks",
    response_model=schemas.WebhookList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_webhooks(principal: Reading, app: App) -> Response:
    """The project's webhooks, oldest first, with the origins of their URLs and without secrets."""
    with app.database.read() as session:
        found = service.listed(session, principal)
    return JSONResponse({"data": [schemas.webhook_view(webhook) for webhook in found]})


@router.post(
    "/webhooks",
    status_code=201,
    summary="Create a webhook",
    response_model=schemas.SecretView,
    response_class=JSONResponse,
    responses=responses(409, 413, 415, 422),
    openapi_extra=json_body(schemas.WebhookWish, schemas.WISH),
)
async def create_webhook(request: Request, principal: Managing, app: App, once: Asked) -> Response:
    """The response shows the secret once. Targets at non-public addresses are rejected, here and at each attempt,
    unless the operator allows them (docs/notices.md)."""
    wish = await read_json(request, schemas.WebhookWish, app.settings.max_body_bytes)
    document = wish.model_dump(mode="json")
    found = await run_in_threadpool(_room, app, principal, once, document)
    if found is not None:
        return found
    await app.lookups.check(principal.project_id, wish.url, app.settings.webhook_allow)
    return await run_in_threadpool(_create, app, principal, once, document, wish)


@router.get(
    "/webhooks/{webhook_id}",
    summary="Show a webhook",
    response_model=schemas.WebhookView,
    response_class=JSONResponse,
    responses=responses(404),
)
def show_webhook(webhook_id: WebhookId, principal: Reading, app: App) -> Response:
    """Its events, and whether and why it is failing or disabled."""
    with app.database.read() as session:
        return JSONResponse(schemas.webhook_view(service.find(session, principal, webhook_id)))


@router.delete(
    "/webhooks/{webhook_id}",
    summary="Delete a webhook",
    response_model=schemas.WebhookView,
    response_class=JSONResponse,
    responses=responses(404),
)
def delete_webhook(webhook_id: WebhookId, principal: Managing, app: App) -> Response:
    """Delete a webhook and its deliveries."""
    with app.database.write() as session:
        return JSONResponse(schemas.webhook_view(service.remove(session, principal, webhook_id)))


@router.post(
    "/webhooks/{webhook_id}/rotate",
    status_code=201,
    summary="Rotate a webhook's secret",
    response_model=schemas.SecretView,
    response_class=JSONResponse,
    responses=responses(404, 409, 422),
)
def rotate_webhook(
    webhook_id: WebhookId,
    principal: Managing,
    app: App,
    once: Asked,
    overlap_hours: Annotated[float, Query(ge=0, le=720, description="So long the old secret signs, too.")] = 24.0,
) -> Response:
    """Create a new secret; the response shows it once. During the overlap each notification has both signatures."""

    def make(session: Session) -> dict[str, Any]:
        webhook, secret = service.rotate(session, principal, webhook_id, overlap_hours * 3600)
        return {**schemas.webhook_view(webhook), "secret": secret}

    return answer(app, principal, once, None, make, status=201, headers=NO_STORE, secret="secret")  # noqa: S106


@router.post(
    "/webhooks/{webhook_id}/enable",
    summary="Enable a webhook again",
    response_model=schemas.WebhookView,
    response_class=JSONResponse,
    responses=responses(404),
)
def enable_webhook(webhook_id: WebhookId, principal: Managing, app: App, once: Asked) -> Response:
    """Enable a webhook that 410 Gone or days of failure have disabled. Dead letters stay until they are resent."""
    return answer(
        app, principal, once, None, lambda session: schemas.webhook_view(service.enable(session, principal, webhook_id))
    )


@router.post(
    "/webhooks/{webhook_id}/test",
    status_code=201,
    summary="Send a test",
    response_model=schemas.DeliveryView,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def test_webhook(webhook_id: WebhookId, principal: Managing, app: App, once: Asked) -> Response:
    """Send a notification of type `webhook.test`; its deliveries show the result."""

    def send(session: Session) -> dict[str, Any]:
        return schemas.delivery_view(service.test(session, principal, webhook_id))

    return answer(app, principal, once, None, send, status=201)


@router.get(
    "/webhooks/{webhook_id}/deliveries",
    summary="List deliveries",
    response_model=schemas.DeliveryPage,
    response_class=JSONResponse,
    responses=responses(400, 404, 422),
)
def list_deliveries(
    webhook_id: WebhookId,
    principal: Reading,
    app: App,
    state: Annotated[Literal["pending", "delivered", "dead"] | None, Query(description="Only these.")] = None,
    limit: Limit = 20,
    after: After = None,
) -> Response:
    """Deliveries, newest first, with the result of the last attempt; `state=dead` lists dead letters."""
    with app.database.read() as session:
        page = service.deliveries(session, principal, webhook_id, state=state, after=after, limit=limit)
    following = page.items[-1].id if page.has_more else None
    data = [schemas.delivery_view(delivery) for delivery in page.items]
    return JSONResponse({"data": data, "has_more": page.has_more, "next": following})


@router.post(
    "/webhooks/{webhook_id}/deliveries/{delivery_id}/resend",
    summary="Resend a notification",
    response_model=schemas.DeliveryView,
    response_class=JSONResponse,
    responses=responses(404, 409),
)
def resend_delivery(
    webhook_id: WebhookId, delivery_id: DeliveryId, principal: Managing, app: App, once: Asked
) -> Response:
    """Send it now, with the same `webhook-id` and a new retry schedule."""

    def send(session: Session) -> dict[str, Any]:
        return schemas.delivery_view(service.resend(session, principal, webhook_id, delivery_id))

    return answer(app, principal, once, None, send)


def _room(app: AppState, principal: Principal, once: Once, document: Any) -> Response | None:
    """The answer of before. Raises Conflict where there is none and the project has its webhooks."""
    found = earlier(app, principal, once, document, secret="secret")  # noqa: S106
    if found is None:
        with app.database.read() as session:
            service.require_room(session, principal)
    return found


def _create(app: AppState, principal: Principal, once: Once, document: Any, wish: schemas.WebhookWish) -> Response:
    def make(session: Session) -> dict[str, Any]:
        webhook, secret = service.create(session, principal, wish)
        return {**schemas.webhook_view(webhook), "secret": secret}

    return answer(
        app,
        principal,
        once,
        document,
        make,
        status=201,
        headers=NO_STORE,
        secret="secret",  # noqa: S106
    )
