"""Webhooks: where a project is told what becomes of its jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from eft.errors import UsageFault
from eft.transport import Param, Transport

Raw = dict[str, Any]


class Webhooks:
    """`client.webhooks`. Answers are as the server sent them (its OpenAPI document says what is in them)."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all(self) -> list[Raw]:
        """The project's, oldest first."""
        data: list[Raw] = self._json("GET", "/webhooks")["data"]
        return data

    def create(
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
        return self._json(
            "POST", "/webhooks", body={field: value for field, value in wish.items() if value is not None}
        )

    def show(self, webhook_id: str) -> Raw:
        return self._json("GET", _hook(webhook_id))

    def delete(self, webhook_id: str) -> Raw:
        return self._json("DELETE", _hook(webhook_id))

    def rotate(self, webhook_id: str, *, overlap_hours: float | None = None) -> Raw:
        """A new secret, in `answer["secret"]`; the old one signs, too, for `overlap_hours` more (default: a day)."""
        return self._json("POST", f"{_hook(webhook_id)}/rotate", params={"overlap_hours": overlap_hours})

    def enable(self, webhook_id: str) -> Raw:
        """One that was disabled, by 410 Gone or by days of failure."""
        return self._json("POST", f"{_hook(webhook_id)}/enable")

    def test(self, webhook_id: str) -> Raw:
        """The delivery of a test notice; `deliveries` says what became of it."""
        return self._json("POST", f"{_hook(webhook_id)}/test")

    def deliveries(self, webhook_id: str, *, state: str | None = None, limit: int = 20) -> list[Raw]:
        """Newest first, at most `limit`; `state`: pending, delivered or dead."""
        rows: list[Raw] = []
        after: str | None = None
        while len(rows) < limit:
            params: dict[str, Param] = {"state": state, "limit": min(200, limit - len(rows)), "after": after}
            page = self._json("GET", f"{_hook(webhook_id)}/deliveries", params=params)
            rows += page["data"]
            after = page["next"]
            if after is None:
                break
        return rows

    def resend(self, webhook_id: str, delivery_id: str) -> Raw:
        """From the first attempt on, with the same `webhook-id`."""
        return self._json("POST", f"{_hook(webhook_id)}/deliveries/{_id(delivery_id)}/resend")

    def _json(self, method: str, path: str, *, params: dict[str, Param] | None = None, body: Raw | None = None) -> Raw:
        answer = self._transport.request(
            method,
            path,
            params=params,
            content=None if body is None else json.dumps(body).encode(),
            headers={} if body is None else {"Content-Type": "application/json"},
            idempotent=method != "POST",
        )
        raw: Raw = answer.json()
        return raw


def _hook(webhook_id: str) -> str:
    return f"/webhooks/{_id(webhook_id)}"


def _id(text: str) -> str:
    # Part of a path: an empty one or `..` would ask for something else.
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise UsageFault(f"{text!r} is not an id; `eft webhooks list` and `eft webhooks deliveries` list them")
    return text
