# Written by client/unasync.py from ../aio/pipelines.py: change that one.
"""Pipelines: jobs one after another, submitted by the server."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from eft.http import paths
from eft.http.responses import Param
from eft.sync import io
from eft.sync.transport import Transport
from eft.types import Pipeline


class Pipelines:
    """`client.pipelines`. A pipeline is a document with `steps`, as docs/pipelines.md describes it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Pipeline:
        """Submit it. The same key with the same spec gives the same pipeline, however often it is sent."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        raw = self._transport.json("POST", "/pipelines", body=spec, headers=headers, idempotent=True)
        return Pipeline.parse(raw)

    def resolve(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Check it without submitting anything; `steps` of the answer have the jobs with every default written out."""
        params: dict[str, Param] = {"dry_run": "true"}
        answer: dict[str, Any] = self._transport.json("POST", "/pipelines", params=params, body=spec, idempotent=True)
        return answer

    def get(self, pipeline_id: str) -> Pipeline:
        return Pipeline.parse(self._transport.json("GET", paths.pipeline(pipeline_id)))

    def all(self, *, status: str | None = None, limit: int = 20) -> list[Pipeline]:
        """Newest first, at most `limit`."""
        found: list[Pipeline] = []
        after: str | None = None
        while len(found) < limit:
            params: dict[str, Param] = {"status": status, "limit": min(200, limit - len(found)), "after": after}
            page = self._transport.json("GET", "/pipelines", params=params)
            found += [Pipeline.parse(raw) for raw in page["data"]]
            after = page["next"]
            if after is None:
                break
        return found

    def cancel(self, pipeline_id: str) -> Pipeline:
        raw = self._transport.json("POST", f"{paths.pipeline(pipeline_id)}/cancel", idempotent=True)
        return Pipeline.parse(raw)

    def retry(self, pipeline_id: str, *, start: str | None = None) -> Pipeline:
        """A new pipeline that begins where a failed or cancelled one ended, or anew at the step named `start`."""
        body = {} if start is None else {"from": start}
        raw = self._transport.json("POST", f"{paths.pipeline(pipeline_id)}/retry", body=body, idempotent=True)
        return Pipeline.parse(raw)

    def delete(self, pipeline_id: str) -> dict[str, Any]:
        """Delete a pipeline that has ended; its jobs stay."""
        answer: dict[str, Any] = self._transport.json("DELETE", paths.pipeline(pipeline_id), idempotent=True)
        return answer

    def events(self, pipeline_id: str, *, after: int = 0, limit: int = 200) -> dict[str, Any]:
        """What has happened so far behind event number `after`: `data`, oldest first, and `has_more`."""
        params: dict[str, Param] = {"format": "json", "after": after, "limit": limit}
        page: dict[str, Any] = self._transport.json("GET", f"{paths.pipeline(pipeline_id)}/events", params=params)
        return page

    def wait(self, pipeline_id: str, *, interval: float = 1.0, patience: float = 300.0) -> Pipeline:
        """Until the pipeline has ended; returns it. Survives a server that is away for at most `patience` seconds."""
        while True:
            found = self._transport.persist(partial(self.get, pipeline_id), patience, None)
            if found.finished:
                return found
            io.sleep(interval)
