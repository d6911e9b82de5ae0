# Written by client/unasync.py from ../aio/queue.py: change that one.
"""The queue, the GPUs and who shares them: `client.queue`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eft.http.responses import Param
from eft.sync.transport import Transport

Raw = dict[str, Any]


class Queue:
    """Answers are as the server sent them (its OpenAPI document says what is in them)."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def show(self, *, limit: int = 100) -> list[Raw]:
        """Jobs in the order of their turns, then those that are held."""
        return self._list("/queue", limit=limit)

    def look(self, *, limit: int = 100) -> tuple[list[Raw], int]:
        """As `show`, and how many more wait."""
        answer: Raw = self._transport.json("GET", "/queue", params={"limit": limit})
        return answer["data"], answer.get("more", 0)

    # --- GPUs

    def gpus(self) -> list[Raw]:
        """Every slot that trains, and who has it."""
        return self._list("/gpus")

    def history(self, gpu: str, *, limit: int = 100) -> list[Raw]:
        """List the past uses of a GPU, newest first."""
        return self._list("/gpus/history", gpu=gpu, limit=limit)

    def holds(self) -> list[Raw]:
        return self._list("/holds")

    def hold(
        self, gpus: Sequence[str], *, until: str | None = None, held_for: str = "", why: str = "", now: bool = False
    ) -> list[Raw]:
        """Leave GPUs to somebody; `until`: ISO 8601 with its offset."""
        wish = {"gpus": list(gpus), "until": until, "for": held_for, "why": why, "now": now}
        return self._change("/holds", wish)

    def release(self, gpus: Sequence[str]) -> list[Raw]:
        return self._change("/holds/release", {"gpus": list(gpus)})

    def drain(self, gpus: Sequence[str], *, why: str = "") -> list[Raw]:
        """Take GPUs out of service; for admins of the box, as is `undrain`."""
        return self._change("/gpus/drain", {"gpus": list(gpus), "why": why})

    def undrain(self, gpus: Sequence[str]) -> list[Raw]:
        return self._change("/gpus/undrain", {"gpus": list(gpus)})

    # --- maintenance, for admins of the box

    def maintenance(self) -> list[Raw]:
        return self._list("/maintenance")

    def plan_maintenance(self, start: str, until: str, *, node: str | None = None, why: str = "") -> Raw:
        """Times in ISO 8601 with their offsets; `node` None: all."""
        return self._post("/maintenance", {"node": node, "from": start, "until": until, "why": why})

    def cancel_maintenance(self, maintenance_id: str) -> Raw:
        return self._post("/maintenance/cancel", {"id": maintenance_id})

    # --- usage and quotas

    def usage(self, *, since: str | None = None, until: str | None = None) -> Raw:
        """By owner and project; days as 2026-11-21."""
        answer: Raw = self._transport.json("GET", "/usage", params={"since": since, "until": until})
        return answer

    def usage_csv(self, *, since: str | None = None, until: str | None = None) -> str:
        params: dict[str, Param] = {"since": since, "until": until, "format": "csv"}
        return (self._transport.request("GET", "/usage", params=params)).text

    def limits(self) -> list[Raw]:
        return self._list("/limits")

    def set_limits(self, scope: str, name: str, **values: float | None) -> Raw:
        """Set quotas of a `project` or an `owner`; None takes one away. For admins of the box."""
        return self._post("/limits", {"scope": scope, "name": name, **values})

    def collect(self, *, dry_run: bool = False) -> Raw:
        """Let go what the rules of retention allow; for admins of the box."""
        params: dict[str, Param] = {"dry_run": "true" if dry_run else None}
        answer: Raw = self._transport.json("POST", "/gc", params=params)
        return answer

    # ---

    def _list(self, path: str, **params: Param) -> list[Raw]:
        data: list[Raw] = (self._transport.json("GET", path, params=params))["data"]
        return data

    def _change(self, path: str, wish: Raw) -> list[Raw]:
        data: list[Raw] = (self._post(path, wish))["data"]
        return data

    def _post(self, path: str, wish: Raw) -> Raw:
        raw: Raw = self._transport.json("POST", path, body=wish)
        return raw
