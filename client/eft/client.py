"""The typed client: one method a verb of the HTTP API."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

from eft import download as downloads
from eft.access import Access
from eft.config import load_config
from eft.errors import EftClientError, LocalError, Unreachable, UsageFault
from eft.queue import Queue
from eft.sse import messages
from eft.transport import FIRST_DELAY, LONGEST_DELAY, Param, T, Transport, backoff
from eft.types import FINAL, Artifact, Event, File, Job, Node, Page
from eft.version import VERSION
from eft.webhooks import Webhooks

STREAM_SILENCE = 60.0
"""Seconds without a byte after which an event stream counts as dead; the server sends keep-alives more often."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    text: str
    attempt: int
    """Whose log it is; 0 before the first."""
    offset: int
    """Where the next chunk begins: pass it to `logs(offset=…)`."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at a running job."""

    job: Job
    events: list[Event]
    """What happened since the look before."""
    loss: float | None
    """The latest; None before the first step."""


class Client:
    """Talks to one eft server: `with Client() as client: client.submit({...})`.

    Address and key come from the arguments, EFT_URL and EFT_API_KEY, or ~/.config/eft/config.toml. Every method raises
    ApiError when the server refuses, Unreachable when it does not answer for `patience` seconds; reading calls, and
    submits (they carry an idempotency key), are sent again meanwhile.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, timeout: float = 30.0, patience: float = 5.0
    ) -> None:
        self.config = load_config(url, api_key)
        self._transport = Transport(self.config, timeout=timeout, patience=patience, user_agent=f"eft-client/{VERSION}")
        self.access = Access(self._transport)
        self.webhooks = Webhooks(self._transport)
        """Users, projects, keys, the audit."""
        self.queue = Queue(self._transport)
        """The order, GPUs and holds, usage and quotas."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    # --- jobs ---------------------------------------------------------------------------------------

    def submit(self, spec: dict[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Enqueue a job. The same key with the same spec gives the same job, however often it is sent."""
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        answer = self._transport.request("POST", "/jobs", content=json.dumps(spec).encode(), headers=headers)
        return Job.parse(answer.json())

    def resolve(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Check a spec without enqueuing it; the answer is the spec with every default written out."""
        answer = self._transport.request(
            "POST",
            "/jobs",
            params={"dry_run": "true"},
            content=json.dumps(spec).encode(),
            headers={"Content-Type": "application/json"},
        )
        resolved: dict[str, Any] = answer.json()["spec"]
        return resolved

    def get(self, job_id: str) -> Job:
        return Job.parse(self._transport.request("GET", _job(job_id)).json())

    def jobs(
        self,
        *,
        status: Sequence[str] | None = None,
        name: str | None = None,
        created_after: str | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page:
        """Newest first; `after` is the `next` of the page before."""
        params: dict[str, Param] = {
            "status": status,
            "name": name,
            "created_after": created_after,
            "limit": limit,
            "after": after,
        }
        raw = self._transport.request("GET", "/jobs", params=params).json()
        return Page([Job.parse(item) for item in raw["data"]], raw.get("next"), raw)

    def cancel(self, job_id: str) -> Job:
        return Job.parse(self._transport.request("POST", f"{_job(job_id)}/cancel").json())

    def pause(self, job_id: str) -> Job:
        """Free its slot and keep what it has done."""
        return Job.parse(self._transport.request("POST", f"{_job(job_id)}/pause").json())

    def resume(self, job_id: str) -> Job:
        """Queue a paused job again; it goes on from its checkpoint."""
        return Job.parse(self._transport.request("POST", f"{_job(job_id)}/resume").json())

    def retry(self, job_id: str) -> Job:
        """A new job with the spec of a failed or cancelled one, going on from its newest checkpoint."""
        return Job.parse(self._transport.request("POST", f"{_job(job_id)}/retry").json())

    def metrics(
        self, job_id: str, *, names: list[str] | None = None, points: int | None = None
    ) -> dict[str, list[tuple[int, float]]]:
        """`{"loss": [(step, value), …], …}`; `points` thins each curve to that many."""
        params = {"names": ",".join(names) if names else None, "points": points}
        raw = self._transport.request("GET", f"{_job(job_id)}/metrics", params=params).json()
        return {name: [(int(step), value) for step, value in curve] for name, curve in raw.items()}

    def samples(self, job_id: str, *, step: int | None = None) -> dict[str, Any]:
        """What the model answered after a step (default: the weights handed back), beside the untrained model."""
        params: dict[str, Param] = {"step": step}
        answer: dict[str, Any] = self._transport.request("GET", f"{_job(job_id)}/samples", params=params).json()
        return answer

    def metrics_csv(self, job_id: str, *, names: list[str] | None = None, points: int | None = None) -> str:
        params = {"names": ",".join(names) if names else None, "points": points, "format": "csv"}
        return self._transport.request("GET", f"{_job(job_id)}/metrics", params=params).text

    def logs(
        self, job_id: str, *, attempt: int | None = None, tail: int | None = None, offset: int | None = None
    ) -> LogChunk:
        """What the trainer printed. `tail`: the last so many lines; `offset`: from that byte on."""
        params = {"attempt": attempt, "tail": tail, "offset": offset}
        answer = self._transport.request("GET", f"{_job(job_id)}/logs", params=params)
        headers = answer.headers
        return LogChunk(
            answer.content.decode(errors="replace"),
            attempt=int(headers.get("x-log-attempt", attempt or 0)),
            offset=int(headers.get("x-log-offset", (offset or 0) + len(answer.content))),
        )

    # --- events -------------------------------------------------------------------------------------

    def events(
        self,
        job_id: str,
        *,
        after: int = 0,
        patience: float = 300.0,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> Iterator[Event]:
        """Everything that happened and happens to a job, from the event behind `after` to its end.

        Survives a restart of the server: after a broken connection it asks again behind the last event it has seen, so
        none is lost or told twice. Gives up (Unreachable, ApiError) when the server is away for `patience` seconds;
        `on_gap` is told of every break.
        """
        last, delay, down_since = after, FIRST_DELAY, None
        while True:
            try:
                headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": str(last)} if last else {})
                with self._transport.stream(
                    "GET", f"{_job(job_id)}/events", headers=headers, timeout=STREAM_SILENCE
                ) as response:
                    delay, down_since = FIRST_DELAY, None
                    for message in messages(response.iter_bytes()):
                        if message.event == "end":
                            return
                        event = Event.parse(json.loads(message.data))
                        if event.seq > last:
                            last = event.seq
                            yield event
                raise Unreachable("the event stream ended before the job did")
            except EftClientError as error:
                now = time.monotonic()
                down_since = now if down_since is None else down_since
                pause = backoff(error, delay)
                if pause is None or now + pause - down_since > patience:
                    raise
                if on_gap is not None:
                    on_gap(error)
            time.sleep(pause)
            delay = min(delay * 2, LONGEST_DELAY)

    def wait(
        self,
        job_id: str,
        *,
        patience: float = 300.0,
        on_event: Callable[[Event], None] | None = None,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> Job:
        """Block until the job has ended, and return it."""
        for event in self.events(job_id, patience=patience, on_gap=on_gap):
            if on_event is not None:
                on_event(event)
        return self.persist(lambda: self.get(job_id), patience)

    def follow(
        self,
        job_id: str,
        *,
        interval: float = 1.0,
        patience: float = 300.0,
        on_gap: Callable[[EftClientError], None] | None = None,
    ) -> Iterator[Snapshot]:
        """Look every `interval` seconds until the job has ended: its state, what is new, and the latest loss.

        For a progress bar: steps and losses are no events (there may be millions of them). Every event comes once.
        """
        seen, step, loss = 0, -1, None
        while True:
            # The job first: its last event is then in the page that is asked for behind it.
            job = self.persist(lambda: self.get(job_id), patience, on_gap)
            events: list[Event] = []
            while True:
                page = self.persist(partial(self._event_page, job_id, seen), patience, on_gap)
                events += [Event.parse(raw) for raw in page["data"]]
                seen = events[-1].seq if events else seen
                if not page["has_more"]:
                    break
            if job.progress is not None and job.progress.step != step:
                step = job.progress.step
                curve = self.persist(lambda: self.metrics(job_id, names=["loss"], points=2), patience, on_gap).get(
                    "loss"
                )
                loss = curve[-1][1] if curve else loss
            yield Snapshot(job, events, loss)
            if job.finished:
                return
            time.sleep(interval)

    def _event_page(self, job_id: str, after: int) -> dict[str, Any]:
        params: dict[str, Param] = {"format": "json", "after": after, "limit": 1000}
        page: dict[str, Any] = self._transport.request("GET", f"{_job(job_id)}/events", params=params).json()
        return page

    def persist(
        self, call: Callable[[], T], patience: float, on_gap: Callable[[EftClientError], None] | None = None
    ) -> T:
        """Make a call of this client again and again while the server is away, for at most `patience` seconds."""
        return self._transport.persist(call, patience, on_gap)

    # --- artifacts ----------------------------------------------------------------------------------

    def artifacts(self, job_id: str) -> list[Artifact]:
        raw = self._transport.request("GET", f"{_job(job_id)}/artifacts").json()
        return [Artifact.parse(item) for item in raw["data"]]

    def download(
        self,
        job_id: str,
        artifacts: list[Artifact] | None = None,
        *,
        into: str | os.PathLike[str],
        patience: float = 60.0,
        on_start: Callable[[Artifact], None] = lambda artifact: None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> list[Path]:
        """Bring artifacts (default: all) below the folder `into`, under the paths they have in the job.

        Each is checked against its SHA-256 and appears whole or not at all; a download that broke off is gone on with.
        Raises DownloadError for a damaged file or a path that leads out of `into`.
        """
        folder = Path(into)
        chosen = self.artifacts(job_id) if artifacts is None else artifacts
        targets = [downloads.local_path(folder, artifact.path) for artifact in chosen]  # all, before the first byte
        for artifact, target in zip(chosen, targets, strict=True):
            on_start(artifact)
            downloads.fetch(
                self._transport,
                f"{_job(job_id)}/artifacts/{quote(artifact.path)}",
                target,
                size=artifact.bytes,
                sha256=artifact.sha256,
                patience=patience,
                advance=advance,
            )
        return targets

    # --- files --------------------------------------------------------------------------------------

    def upload(
        self,
        path: str | os.PathLike[str],
        *,
        filename: str | None = None,
        format: str | None = None,
        columns: Mapping[str, str] | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> File:
        """Send a training file (JSON Lines, JSON, CSV or Parquet) from disk, never all of it in memory. The server
        checks every row. `format`: needed only where rows fit two; `columns`: from its names to the file's."""
        source = Path(path)
        try:
            stream = source.open("rb")
        except OSError as error:
            raise LocalError(f"{source}: {error.strerror or error}") from error
        with stream:
            body: Any = _Counted(stream, advance) if advance else stream
            answer = self._transport.request(
                "POST",
                "/files",
                files=[  # what says how to read the rows comes before them
                    *([("format", (None, format))] if format is not None else []),
                    *([("columns", (None, json.dumps(dict(columns))))] if columns else []),
                    ("file", (filename or source.name, body, "application/octet-stream")),
                ],
                idempotent=False,  # a second copy of a large file is worse than an error
                timeout=600.0,  # the server answers when all lines are checked
            )
        return File.parse(answer.json())

    def files(self, *, sha256: str | None = None) -> Iterator[File]:
        """All files of the project, or those with these very bytes, newest first."""
        after: str | None = None
        while True:
            params: dict[str, Param] = {"sha256": sha256, "after": after, "limit": 100}
            raw = self._transport.request("GET", "/files", params=params).json()
            yield from (File.parse(item) for item in raw["data"])
            after = raw.get("next")
            if not raw.get("has_more") or after is None:
                return

    def file(self, file_id: str) -> File:
        return File.parse(self._transport.request("GET", _file(file_id)).json())

    def delete_file(self, file_id: str) -> None:
        self._transport.request("DELETE", _file(file_id))

    def preview(self, file_id: str, job: dict[str, Any], *, patience: float = 300.0) -> dict[str, Any]:
        """What training with the options of `job` (a job without `data.train`) would make of a file: waits for a worker
        to find it out, and answers the preview, whether it has succeeded or failed."""
        answer: dict[str, Any] = self._transport.request(
            "POST",
            f"{_file(file_id)}/preview",
            content=json.dumps(job).encode(),
            headers={"Content-Type": "application/json"},
        ).json()
        path = f"{_file(file_id)}/previews/{quote(answer['id'], safe='')}"
        params: dict[str, Param] = {"wait": 20}
        while answer["status"] not in FINAL:
            answer = self.persist(lambda: self._transport.request("GET", path, params=params).json(), patience)
        return answer

    @contextmanager
    def file_content(self, file_id: str) -> Generator[Iterator[bytes], None, None]:
        with self._transport.stream("GET", f"{_file(file_id)}/content") as response:
            yield response.iter_bytes(1 << 20)

    # --- nodes --------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        """The boxes of the installation."""
        return [Node.parse(raw) for raw in self._transport.request("GET", "/nodes").json()["data"]]

    def node(self, name: str) -> Node:
        return Node.parse(self._transport.request("GET", _node(name)).json())

    def drain(self, name: str, *, reason: str = "") -> Node:
        """Claim nothing more on a node and hand back what runs there, with a checkpoint of this moment."""
        params: dict[str, Param] = {"reason": reason or None}
        return Node.parse(self._transport.request("POST", f"{_node(name)}/drain", params=params).json())

    def undrain(self, name: str) -> Node:
        """Let a node take jobs again."""
        return Node.parse(self._transport.request("POST", f"{_node(name)}/undrain").json())

    # --- the server ---------------------------------------------------------------------------------

    def version(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._transport.request("GET", "/version").json()
        return answer


class _Counted:
    """A file that tells how much of it was read."""

    def __init__(self, stream: IO[bytes], advance: Callable[[int], None]) -> None:
        self._stream, self._advance = stream, advance

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._advance(len(chunk))
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def fileno(self) -> int:
        return self._stream.fileno()


def _job(job_id: str) -> str:
    return f"/jobs/{_id(job_id)}"


def _file(file_id: str) -> str:
    return f"/files/{_id(file_id)}"


def _node(name: str) -> str:
    if not name or name in (".", ".."):
        raise UsageFault(f"{name!r} is not a node; `eft worker list` shows them")
    return f"/nodes/{quote(name, safe='')}"


def _id(text: str) -> str:
    # Part of a path: an empty one or `..` would ask for something else.
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise UsageFault(f"{text!r} is not an id; `eft ls` and `eft files ls` list them")
    return text
