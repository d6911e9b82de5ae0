"""The queue, the GPUs and who shares them: `client.queue`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eft.aio.transport import AsyncTransport
from eft.http.responses import Param

Raw = dict[str, Any]


class AsyncQueue:
    """Answers are as the server sent them (its OpenAPI document says what is in them)."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def show(self, *, limit: int = 100) -> list[Raw]:
        """Jobs in the order of their turns, then those that are held."""
        return await self._list("/queue", limit=limit)

    async def look(self, *, limit: int = 100) -> tuple[list[Raw], int]:
        """As `show`, and how many more wait."""
        answer: Raw = await self._transport.json("GET", "/queue", params={"limit": limit})
        return answer["data"], answer.get("more", 0)

    # --- GPUs

    async def gpus(self) -> list[Raw]:
        """Every slot that trains, and who has it."""
        return await self._list("/gpus")

    async def history(self, gpu: str, *, limit: int = 100) -> list[Raw]:
        """List the past uses of a GPU, newest first."""
        return await self._list("/gpus/history", gpu=gpu, limit=limit)

    async def holds(self) -> list[Raw]:
        return await self._list("/holds")

    async def hold(
        self, gpus: Sequence[str], *, until: str | None = None, held_for: str = "", why: str = "", now: bool = False
    ) -> list[Raw]:
        """Leave GPUs to somebody; `until`: ISO 8601 with its offset."""
        wish = {"gpus": list(gpus), "until": until, "for": held_for, "why": why, "now": now}
        return await self._change("/holds", wish)

    async def release(self, gpus: Sequence[str]) -> list[Raw]:
        return await self._change("/holds/release", {"gpus": list(gpus)})

    async def drain(self, gpus: Sequence[str], *, why: str = "") -> list[Raw]:
        """Take GPUs out of service; for admins of the box, as is `undrain`."""
        return await self._change("/gpus/drain", {"gpus": list(gpus), "why": why})

    async def undrain(self, gpus: Sequence[str]) -> list[Raw]:
        return await self._change("/gpus/undrain", {"gpus": list(gpus)})

    # --- maintenance, for admins of the box

    async def maintenance(self) -> list[Raw]:
        return await self._list("/maintenance")

    async def plan_maintenance(self, start: str, until: str, *, node: str | None = None, why: str = "") -> Raw:
        """Times in ISO 8601 with their offsets; `node` None: all."""
        return await self._post("/maintenance", {"node": node, "from": start, "until": until, "why": why})

    async def cancel_maintenance(self, maintenance_id: str) -> Raw:
        return await self._post("/maintenance/cancel", {"id": maintenance_id})

    # --- usage and quotas

    async def usage(self, *, since: str | None = None, until: str | None = None) -> Raw:
        """By owner and project; days as 2026-11-21."""
        answer: Raw = await self._transport.json("GET", "/usage", params={"since": since, "until": until})
        return answer

    async def usage_csv(self, *, since: str | None = None, until: str | None = None) -> str:
        params: dict[str, Param] = {"since": since, "until": until, "format": "csv"}
        return (await self._transport.request("GET", "/usage", params=params)).text

    async def limits(self) -> list[Raw]:
        return await self._list("/limits")

    async def set_limits(self, scope: str, name: str, **values: float | None) -> Raw:
        """Set quotas of a `project` or an `owner`; None takes one away. For admins of the box."""
        return await self._post("/limits", {"scope": scope, "name": name, **values})

    async def collect(self, *, dry_run: bool = False) -> Raw:
        """Let go what the rules of retention allow; for admins of the box."""
        params: dict[str, Param] = {"dry_run": "true" if dry_run else None}
        answer: Raw = await self._transport.json("POST", "/gc", params=params)
        return answer

    # ---

    async def _list(self, path: str, **params: Param) -> list[Raw]:
        data: list[Raw] = (await self._transport.json("GET", path, params=params))["data"]
        return data

    async def _change(self, path: str, wish: Raw) -> list[Raw]:
        data: list[Raw] = (await self._post(path, wish))["data"]
        return data

    async def _post(self, path: str, wish: Raw) -> Raw:
        raw: Raw = await self._transport.json("POST", path, body=wish)
        return raw
