"""Sweeps: one job with other values, run by run."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from eft.aio import io
from eft.aio.transport import AsyncTransport
from eft.http import paths
from eft.http.responses import Param
from eft.types import Sweep


class AsyncSweeps:
    """`client.sweeps`. A sweep is a job with `sweep`, as docs/sweeps.md describes it."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Sweep:
        """Submit all of its runs. The same key with the same spec gives the same sweep, however often it is sent."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        raw = await self._transport.json("POST", "/sweeps", body=spec, headers=headers, idempotent=True)
        return Sweep.parse(raw)

    async def resolve(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Check it without submitting anything: number of `runs`, their `points`, the `first` job and its `plan`."""
        params: dict[str, Param] = {"dry_run": "true"}
        answer: dict[str, Any] = await self._transport.json(
            "POST", "/sweeps", params=params, body=spec, idempotent=True
        )
        return answer

    async def get(self, sweep_id: str) -> Sweep:
        return Sweep.parse(await self._transport.json("GET", paths.sweep(sweep_id)))

    async def all(self, *, limit: int = 20) -> list[Sweep]:
        """Newest first, at most `limit`, and at most 200."""
        params: dict[str, Param] = {"limit": min(200, limit)}
        page = await self._transport.json("GET", "/sweeps", params=params)
        return [Sweep.parse(raw) for raw in page["data"]]

    async def cancel(self, sweep_id: str) -> Sweep:
        """Cancel all runs that have not ended."""
        return Sweep.parse(await self._transport.json("POST", f"{paths.sweep(sweep_id)}/cancel", idempotent=True))

    async def delete(self, sweep_id: str) -> dict[str, Any]:
        """Delete a sweep that has ended; its jobs stay."""
        answer: dict[str, Any] = await self._transport.json("DELETE", paths.sweep(sweep_id), idempotent=True)
        return answer

    async def wait(self, sweep_id: str, *, interval: float = 1.0, patience: float = 300.0) -> Sweep:
        """Until the sweep has ended; returns it. Survives a server that is away for at most `patience` seconds."""
        while True:
            found = await self._transport.persist(partial(self.get, sweep_id), patience, None)
            if found.finished:
                return found
            await io.sleep(interval)
