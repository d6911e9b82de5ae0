"""Webhooks: where a project is told what becomes of its jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eft.aio.transport import AsyncTransport
from eft.http import paths
from eft.http.responses import Param

Raw = dict[str, Any]
_LISTED_BY = "`eft webhooks deliveries` lists them"


class AsyncWebhooks:
    """`client.webhooks`. Answers are as the server sent them (its OpenAPI document says what is in them)."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def all(self) -> list[Raw]:
        """The project's, oldest first."""
        data: list[Raw] = (await self._json("GET", "/webhooks"))["data"]
        return data

    async def create(
        self,
        url: str,
        *,
        name: str | None = None,
        kind: str | None = None,
        events: Sequence[str] | None = None,
        all_jobs: bool | None = None,
    ) -> Raw:
        """`answer["secret"]` signs its notices and is shown this once; None for a chat."""
        wish = {"url": url, "name": name, "kind": kind, "events": events and [*events], "all_jobs": all_jobs}
        body = {field: value for field, value in wish.items() if value is not None}
        return await self._json("POST", "/webhooks", body=body)

    async def show(self, webhook_id: str) -> Raw:
        return await self._json("GET", paths.webhook(webhook_id))

    async def delete(self, webhook_id: str) -> Raw:
        return await self._json("DELETE", paths.webhook(webhook_id))

    async def rotate(self, webhook_id: str, *, overlap_hours: float | None = None) -> Raw:
        """A new secret, in `answer["secret"]`; the old one signs, too, for `overlap_hours` more (default: a day)."""
        path = f"{paths.webhook(webhook_id)}/rotate"
        return await self._json("POST", path, params={"overlap_hours": overlap_hours})

    async def enable(self, webhook_id: str) -> Raw:
        """One that was disabled, by 410 Gone or by days of failure."""
        return await self._json("POST", f"{paths.webhook(webhook_id)}/enable")

    async def test(self, webhook_id: str) -> Raw:
        """The delivery of a test notice; `deliveries` says what became of it."""
        return await self._json("POST", f"{paths.webhook(webhook_id)}/test")

    async def deliveries(self, webhook_id: str, *, state: str | None = None, limit: int = 20) -> list[Raw]:
        """Newest first, at most `limit`; `state`: pending, delivered or dead."""
        rows: list[Raw] = []
        after: str | None = None
        while len(rows) < limit:
            params: dict[str, Param] = {"state": state, "limit": min(200, limit - len(rows)), "after": after}
            page = await self._json("GET", f"{paths.webhook(webhook_id)}/deliveries", params=params)
            rows += page["data"]
            after = page["next"]
            if after is None:
                break
        return rows

    async def resend(self, webhook_id: str, delivery_id: str) -> Raw:
        """From the first attempt on, with the same `webhook-id`."""
        delivery = paths.identity(delivery_id, _LISTED_BY)
        return await self._json("POST", f"{paths.webhook(webhook_id)}/deliveries/{delivery}/resend")

    async def _json(
        self, method: str, path: str, *, params: dict[str, Param] | None = None, body: Raw | None = None
    ) -> Raw:
        raw: Raw = await self._transport.json(method, path, params=params, body=body)
        return raw
