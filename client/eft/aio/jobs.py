"""Jobs: submit them, steer them, and read what they have measured and printed."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from eft.aio import io
from eft.aio.transport import AsyncTransport
from eft.errors import EftClientError
from eft.http import paths
from eft.http.responses import Param
from eft.types import FINAL, Job, LogChunk, Page


class AsyncJobs:
    _transport: AsyncTransport

    async def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Enqueue a job. The same key with the same spec gives the same job, however often it is sent."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return Job.parse(await self._transport.json("POST", "/jobs", body=spec, headers=headers, idempotent=True))

    async def resolve(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Check a spec without enqueuing it; the answer is the spec with every default written out."""
        params: dict[str, Param] = {"dry_run": "true"}
        answer = await self._transport.json("POST", "/jobs", params=params, body=spec, idempotent=True)
        resolved: dict[str, Any] = answer["spec"]
        return resolved

    async def plan(self, spec: dict[str, Any]) -> dict[str, Any]:
        """What a job would take here, by an estimate: `spec` resolved, and `plan` (null where its model was never
        prepared there: `plan_reason` says so) with bytes, method, disk and time for each kind of slot."""
        params: dict[str, Param] = {"dry_run": "true"}
        answer: dict[str, Any] = await self._transport.json("POST", "/jobs", params=params, body=spec, idempotent=True)
        return answer

    async def try_rewards(self, spec: dict[str, Any], *, patience: float = 300.0) -> dict[str, Any]:
        """What the untrained model's answers to prompts of the job are rewarded with: waits for the trial's end, and
        answers the trial, whether it has succeeded or failed."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        first = await self._transport.json("POST", "/rewards/try", body=spec, headers=headers, idempotent=True)
        answer: dict[str, Any] = first
        path, params = f"/rewards/try/{paths.identity(answer['id'])}", {"wait": 20}
        while answer["status"] not in FINAL:
            look = partial(self._transport.json, "GET", path, params=params)
            answer = await self._transport.persist(look, patience)
        return answer

    async def get(self, job_id: str) -> Job:
        return Job.parse(await self._transport.json("GET", paths.job(job_id)))

    async def jobs(
        self,
        *,
        status: Sequence[str] | None = None,
        name: str | None = None,
        created_after: str | None = None,
        tags: Sequence[str] | None = None,
        archived: bool = False,
        limit: int = 20,
        after: str | None = None,
    ) -> Page:
        """Those that have all of `tags`, newest first; archived ones only with `archived`. `after` is the `next` of the
        page before."""
        params: dict[str, Param] = {
            "status": status,
            "name": name,
            "created_after": created_after,
            "tag": tags,
            "archived": "true" if archived else None,
            "limit": limit,
            "after": after,
        }
        raw = await self._transport.json("GET", "/jobs", params=params)
        return Page([Job.parse(item) for item in raw["data"]], raw.get("next"), raw)

    async def cancel(self, job_id: str) -> Job:
        return await self._ask(job_id, "cancel")

    async def pause(self, job_id: str) -> Job:
        """Free its slot and keep what it has done."""
        return await self._ask(job_id, "pause")

    async def resume(self, job_id: str) -> Job:
        """Queue a paused job again; it goes on from its checkpoint."""
        return await self._ask(job_id, "resume")

    async def retry(self, job_id: str, *, max_runtime_seconds: int | None = None) -> Job:
        """A new job with the spec of a failed or cancelled one that continues from its newest checkpoint, with another
        time limit if one is given."""
        if max_runtime_seconds is None:
            return await self._ask(job_id, "retry")
        body = {"resources": {"max_runtime_seconds": max_runtime_seconds}}
        return Job.parse(await self._transport.json("POST", f"{paths.job(job_id)}/retry", body=body, idempotent=True))

    async def lineage(self, job_id: str) -> list[dict[str, Any]]:
        """The job, then the jobs that its model is made of, nearest first, with the hashes of data, spec, chat
        template, code and weights."""
        found: list[dict[str, Any]] = (await self._transport.json("GET", f"{paths.job(job_id)}/lineage"))["data"]
        return found

    async def set_priority(self, job_id: str, priority: int) -> Job:
        """Change the priority of a job that has not ended; its place in the queue changes at once."""
        body = {"priority": priority}
        return Job.parse(await self._transport.json("PATCH", paths.job(job_id), body=body, idempotent=True))

    async def label(
        self, job_id: str, *, tags: Sequence[str] | None = None, note: str | None = None, archived: bool | None = None
    ) -> Job:
        """Replace a job's tags, its note ("" removes it), or archive it: lists leave it out. What is None stays."""
        given = {"tags": None if tags is None else list(tags), "note": note, "archived": archived}
        body = {name: value for name, value in given.items() if value is not None}
        return Job.parse(await self._transport.json("PATCH", paths.job(job_id), body=body, idempotent=True))

    async def delete(self, job_id: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Delete a job that has ended, with checkpoints, artifacts, model, logs and spec; `freed_bytes` says how much
        went. With `dry_run`: how much would go, and in `obstacles` why the job cannot be deleted now."""
        params: dict[str, Param] = {"dry_run": "true" if dry_run else None}
        answer: dict[str, Any] = await self._transport.json("DELETE", paths.job(job_id), params=params, idempotent=True)
        return answer

    async def _ask(self, job_id: str, verb: str) -> Job:
        # Asking twice for one of these is asking once, says the API: an answer that was lost is asked for again.
        return Job.parse(await self._transport.json("POST", f"{paths.job(job_id)}/{verb}", idempotent=True))

    # --- what they measured

    async def metrics(
        self, job_id: str, *, names: Sequence[str] | None = None, points: int | None = None
    ) -> dict[str, list[tuple[int, float]]]:
        """`{"loss": [(step, value), …], …}`; `points` thins each curve to that many."""
        params: dict[str, Param] = {"names": ",".join(names) if names else None, "points": points}
        raw = await self._transport.json("GET", f"{paths.job(job_id)}/metrics", params=params)
        return {name: [(int(step), value) for step, value in curve] for name, curve in raw.items()}

    async def metrics_csv(self, job_id: str, *, names: Sequence[str] | None = None, points: int | None = None) -> str:
        params: dict[str, Param] = {"names": ",".join(names) if names else None, "points": points, "format": "csv"}
        return (await self._transport.request("GET", f"{paths.job(job_id)}/metrics", params=params)).text

    async def trace(self, job_id: str) -> dict[str, Any]:
        """Where the job's time went, in Chrome's trace format, which Perfetto opens."""
        found: dict[str, Any] = await self._transport.json("GET", f"{paths.job(job_id)}/trace")
        return found

    async def samples(self, job_id: str, *, step: int | None = None) -> dict[str, Any]:
        """What the model answered after a step (default: that of the exported weights), beside the untrained model."""
        params: dict[str, Param] = {"step": step}
        answer: dict[str, Any] = await self._transport.json("GET", f"{paths.job(job_id)}/samples", params=params)
        return answer

    async def rollouts(
        self, job_id: str, *, step: int | None = None, offset: int = 0, limit: int | None = None
    ) -> dict[str, Any]:
        """A page of the answers that a step of reinforcement learning used (default: the newest), with their rewards.
        `offset`: the `next` of the page before."""
        params: dict[str, Param] = {"step": step, "offset": offset, "limit": limit}
        answer: dict[str, Any] = await self._transport.json("GET", f"{paths.job(job_id)}/rollouts", params=params)
        return answer

    # --- what they printed

    async def logs(
        self, job_id: str, *, attempt: int | None = None, tail: int | None = None, offset: int | None = None
    ) -> LogChunk:
        """What the trainer printed, at most 1 MiB. `tail`: the last so many lines; `offset`: from that byte on."""
        params: dict[str, Param] = {"attempt": attempt, "tail": tail, "offset": offset}
        answer = await self._transport.request("GET", f"{paths.job(job_id)}/logs", params=params)
        headers = answer.headers
        return LogChunk(
            answer.content.decode(errors="replace"),
            attempt=int(headers.get("x-log-attempt", attempt or 0)),
            offset=int(headers.get("x-log-offset", (offset or 0) + len(answer.content))),
        )

    async def follow_logs(
        self,
        job_id: str,
        *,
        attempt: int | None = None,
        tail: int | None = None,
        interval: float = 1.0,
        patience: float = 300.0,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> AsyncIterator[LogChunk]:
        """What the trainer prints until the job has ended, from the newest attempt on, attempt by attempt; with
        `attempt`, that one alone.

        Survives a restart of the server: it asks again from the byte it has come to, so that nothing is lost or told
        twice. `tail`: begin with the last so many lines. Looks every `interval` seconds; gives up (Unreachable,
        ApiError) when the server is away for `patience` seconds; `on_gap` is told of every break.
        """
        current, offset, begun = attempt, 0, False
        while True:
            # The job first: when it has ended or gone on to a next attempt, its log of now is all there will be of it.
            job = await self._transport.persist(partial(self.get, job_id), patience, on_gap)
            if not current:  # nothing has been printed before the first attempt
                current = job.attempt
            while current:
                where = {"tail": tail} if tail is not None and not begun else {"offset": offset}
                read = partial(self.logs, job_id, attempt=current, **where)
                chunk = await self._transport.persist(read, patience, on_gap)
                begun, offset = True, chunk.offset
                if not chunk.text:
                    break
                yield chunk
            if job.attempt > (current or 0) and attempt is None:
                current, offset, begun = (current or 0) + 1, 0, True
            elif job.finished or job.attempt > (current or 0):
                return
            else:
                await io.sleep(interval)
