# Written by client/unasync.py from ../aio/sweeps.py: change that one.
"""Sweeps: one job with other values, run by run."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from eft.http import paths
from eft.http.responses import Param
from eft.sync import io
from eft.sync.transport import Transport
from eft.types import Sweep


class Sweeps:
    """`client.sweeps`. A sweep is a job with `sweep`, as docs/sweeps.md describes it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Sweep:
        """Submit all of its runs. The same key with the same spec gives the same sweep, however often it is sent."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        raw = self._transport.json("POST", "/sweeps", body=spec, headers=headers, idempotent=True)
        return Sweep.parse(raw)

    def resolve(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Check it without submitting anything: number of `runs`, their `points`, the `first` job and its `plan`."""
        params: dict[str, Param] = {"dry_run": "true"}
        answer: dict[str, Any] = self._transport.json("POST", "/sweeps", params=params, body=spec, idempotent=True)
        return answer

    def get(self, sweep_id: str) -> Sweep:
        return Sweep.parse(self._transport.json("GET", paths.sweep(sweep_id)))

    def all(self, *, limit: int = 20) -> list[Sweep]:
        """Newest first, at most `limit`, and at most 200."""
        params: dict[str, Param] = {"limit": min(200, limit)}
        page = self._transport.json("GET", "/sweeps", params=params)
        return [Sweep.parse(raw) for raw in page["data"]]

    def cancel(self, sweep_id: str) -> Sweep:
        """Cancel all runs that have not ended."""
        return Sweep.parse(self._transport.json("POST", f"{paths.sweep(sweep_id)}/cancel", idempotent=True))

    def delete(self, sweep_id: str) -> dict[str, Any]:
        """Delete a sweep that has ended; its jobs stay."""
        answer: dict[str, Any] = self._transport.json("DELETE", paths.sweep(sweep_id), idempotent=True)
        return answer

    def wait(self, sweep_id: str, *, interval: float = 1.0, patience: float = 300.0) -> Sweep:
        """Until the sweep has ended; returns it. Survives a server that is away for at most `patience` seconds."""
        while True:
            found = self._transport.persist(partial(self.get, sweep_id), patience, None)
            if found.finished:
                return found
            io.sleep(interval)
