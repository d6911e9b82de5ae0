"""The users of a chaos run: they submit, pause, resume, cancel and retry over HTTP, take slots and nodes for themselves
and give them back, set quotas and hurry; and they ask again when in doubt.

What they were told is kept in `Ledger`; that, and nothing from inside the service, is what it is held to afterwards.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

PROJECT = "chaos"
WAITING = ("queued", "preparing", "starting", "running")
RETRY_SECONDS = 0.3
TIMEOUT = 10.0
"""A reply that takes longer has an unknown outcome, and the request is sent again."""


@dataclass(slots=True)
class Ledger:
    """What the service has promised, and to whom. Written from several threads under `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    accepted: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Job id → (name, number of its spec), of every POST that was answered 201."""
    asked: set[str] = field(default_factory=set)
    """Names of submits that were begun."""
    left: set[str] = field(default_factory=set)
    """Names of submits whose sender did not wait for the answer: such a job may exist, once."""
    cancel_asked: set[str] = field(default_factory=set)
    cancel_accepted: set[str] = field(default_factory=set)
    retries: dict[str, str] = field(default_factory=dict)
    """New job → the job it is a retry of."""
    pipelines: set[str] = field(default_factory=set)
    """Ids of pipelines, of every POST that was answered 201."""
    wrong: list[str] = field(default_factory=list)
    """Answers that no crash excuses."""
    counts: Counter[str] = field(default_factory=Counter)


class People:
    """`wish` runs in threads of the caller. `statuses` tells what the jobs were doing a moment ago."""

    def __init__(
        self, url: str, key: str, specs: list[dict[str, Any]], run: str, statuses: Callable[[], Mapping[str, str]]
    ) -> None:
        self.ledger = Ledger()
        self.specs = specs
        self._run = run
        self._url, self._key = url, key
        self._statuses = statuses
        self._numbers = iter(range(1, 1_000_000))
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=20),
        )
        self._places: list[str] = []
        """Slots as people name them; from the first look at them on."""
        self._nodes: list[str] = []
        self.stopped = threading.Event()
        """No wish is begun any more, and none is tried for ever."""

    def close(self) -> None:
        self._client.close()

    # -- wishes

    def wish(self, kind: str, pick: float) -> str:
        """Do it until the answer is known; what came of it, in words for the log of actions."""
        match kind:
            case "submit":
                return self.submit(pick)
            case "submit_and_leave":
                return self._submit_and_leave(pick)
            case "pause":
                return self._steer("pause", self._choose(pick, WAITING))
            case "resume":
                return self._steer("resume", self._choose(pick, ("paused", "pausing")))
            case "cancel":
                return self._cancel(self._choose(pick, (*WAITING, "paused", "pausing")))
            case "retry":
                with self.ledger.lock:
                    tried = set(self.ledger.retries.values())
                return self._retry(self._choose(pick, ("cancelled",), without=tried))
            case "urgent":
                return self.submit(pick, priority=10)
            case "hold":
                when = {"now": pick < 0.5, "until": None, "why": "chaos"}
                return self._take("/holds", {"gpus": self._slot(pick), **when})
            case "drain_gpu":
                return self._take("/gpus/drain", {"gpus": self._slot(pick), "why": "chaos"})
            case "release":
                return self._release()
            case "drain_node":
                return self._take(f"/nodes/{self._node(pick)}/drain", None)
            case "undrain_node":
                return "; ".join(self._take(f"/nodes/{node}/undrain", None) for node in self._nodes) or "no node"
            case "quota":
                # None half of the time: while a quota holds jobs, slots stay free, and nobody has to make room.
                return self._quota(1 + int(pick * 6) if pick < 0.5 else None)
            case _:
                raise ValueError(kind)

    def open_all(self) -> None:
        """Nothing is held or drained any more, and nobody has a quota."""
        self._release()
        for node in self._nodes:
            self._take(f"/nodes/{node}/undrain", None)
        self._quota(None)

    def allow_preemption(self) -> None:
        """Jobs of this project make room for those of a higher priority."""
        self._take("/limits", {"scope": "project", "name": PROJECT, "preemptible": True})

    def look_around(self) -> int:
        """Learn which slots there are: how many."""
        rows = self.get("/gpus").json()["data"]
        self._places = sorted(row["gpu"] for row in rows)
        self._nodes = sorted({row["node"] for row in rows})
        return len(self._places)

    def _slot(self, pick: float) -> list[str]:
        return [self._places[int(pick * len(self._places))]]

    def _node(self, pick: float) -> str:
        return self._nodes[int(pick * len(self._nodes))]

    def _take(self, path: str, body: dict[str, Any] | None) -> str:
        """Asked again after an unknown outcome it may be held already: 409."""
        what = path.rsplit("/", 1)[-1] if path.startswith("/nodes") else path[1:]
        reply = self.until_known("POST", path, **({} if body is None else {"json": body}))
        if reply is None:
            return f"{what}: gave up"
        if reply.status_code not in (200, 201, 409):
            return self._wrong(f"{path} {body}: {reply.status_code} {reply.text[:300]}")
        self._count(f"{what}: {reply.status_code}")
        return f"{what} {body or path}: {reply.status_code}"

    def _release(self) -> str:
        """All that is held now."""
        reply = self.until_known("GET", "/holds")
        if reply is None or reply.status_code != 200:
            return "holds: gave up"
        held = [row["gpu"] for row in reply.json()["data"]]
        # One by one: whoever releases at the same moment would leave nothing of a list.
        said = [self._take("/gpus/undrain", {"gpus": [gpu]}) for gpu in held]
        return "; ".join(said) or "nothing is held"

    def _quota(self, most: int | None) -> str:
        return self._take("/limits", {"scope": "project", "name": PROJECT, "max_running": most})

    def resume(self, job_id: str) -> str:
        return self._steer("resume", job_id)

    def submit(self, pick: float, priority: int = 0) -> str:
        name, number, body = self._new(pick, priority)
        key = str(uuid.uuid4())
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        reply = self.until_known("POST", "/jobs", content=body, headers=headers)
        if reply is None:
            return f"{name}: gave up"
        if reply.status_code != 201:
            return self._wrong(f"submit of {name}: {reply.status_code} {reply.text[:300]}")
        job_id = reply.json()["id"]
        with self.ledger.lock:
            self.ledger.accepted[job_id] = (name, number)
            self.ledger.counts["submitted"] += 1
            self.ledger.counts["replayed"] += reply.headers.get("idempotency-replayed") == "true"
        if random.Random(pick).random() < 0.3:  # a client that forgot that it had its answer
            again = self.until_known("POST", "/jobs", content=body, headers=headers)
            if again is not None and (again.status_code != 201 or again.json()["id"] != job_id):
                return self._wrong(f"{name} again with its key: {again.status_code} {again.text[:300]}, not {job_id}")
        return job_id

    def pipeline(self) -> str:
        """Two jobs, the second from the adapter of the first; the service submits it."""
        names = []
        for _ in range(2):
            with self.ledger.lock:
                names.append(f"{self._run}-{next(self._numbers)}")
                self.ledger.asked.add(names[-1])
                self.ledger.left.add(names[-1])  # nobody is told of these jobs, and each may be there once
        first = {**self.specs[0], "name": names[0], "priority": 5}
        second = {name: value for name, value in first.items() if name != "model"} | {"name": names[1]}
        steps = [{"name": f"step-{number}", "job": job} for number, job in enumerate((first, second))]
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        reply = self.until_known("POST", "/pipelines", json={"steps": steps}, headers=headers)
        if reply is None:
            return "pipeline: gave up"
        if reply.status_code != 201:
            return self._wrong(f"pipeline: {reply.status_code} {reply.text[:300]}")
        with self.ledger.lock:
            self.ledger.pipelines.add(reply.json()["id"])
        return str(reply.json()["id"])

    def pipelines_run(self) -> bool:
        """False where the API does not answer now, too."""
        try:
            return bool(self.get("/pipelines", params={"status": "running"}).json()["data"])
        except (httpx.HTTPError, AssertionError):
            return True

    def _submit_and_leave(self, pick: float) -> str:
        """A client that dies before the answer."""
        name, _, body = self._new(pick)
        with self.ledger.lock:
            self.ledger.left.add(name)
        host, _, port = self._url.removeprefix("http://").partition(":")
        request = (
            f"POST /jobs HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {self._key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        try:
            with socket.create_connection((host, int(port)), timeout=2) as connection:
                connection.sendall(request)
        except OSError as error:
            return f"{name}: {error}"
        return f"{name}: sent"

    def _steer(self, verb: str, job_id: str | None) -> str:
        if job_id is None:
            return "nobody to ask for"
        reply = self.until_known("POST", f"/jobs/{job_id}/{verb}")
        if reply is None:
            return f"{job_id}: gave up"
        if reply.status_code not in (200, 409):
            return self._wrong(f"{verb} of {job_id}: {reply.status_code} {reply.text[:300]}")
        with self.ledger.lock:
            self.ledger.counts[f"{verb}: {reply.status_code}"] += 1
        return f"{job_id}: {reply.json().get('status') or reply.json()['error']['code']}"

    def _cancel(self, job_id: str | None) -> str:
        if job_id is None:
            return "nobody to ask for"
        with self.ledger.lock:
            self.ledger.cancel_asked.add(job_id)
        said = self._steer("cancel", job_id)
        if said.endswith((": stopping", ": cancelled")):
            with self.ledger.lock:
                self.ledger.cancel_accepted.add(job_id)
        return said

    def _retry(self, job_id: str | None) -> str:
        if job_id is None:
            return "nobody to ask for"
        reply = self.until_known("POST", f"/jobs/{job_id}/retry")
        if reply is None:
            return f"{job_id}: gave up"
        if reply.status_code == 409:
            return f"{job_id}: {reply.json()['error']['code']}"
        if reply.status_code not in (200, 201):
            return self._wrong(f"retry of {job_id}: {reply.status_code} {reply.text[:300]}")
        new = reply.json()["id"]
        with self.ledger.lock:
            self.ledger.retries[new] = job_id
            self.ledger.counts["retried"] += 1
        return f"{job_id}: {new}"

    # -- parts

    def _new(self, pick: float, priority: int = 0) -> tuple[str, int, bytes]:
        with self.ledger.lock:
            name = f"{self._run}-{next(self._numbers)}"
            self.ledger.asked.add(name)
        number = int(pick * len(self.specs))
        return name, number, json.dumps({**self.specs[number], "name": name, "priority": priority}).encode()

    def _choose(self, pick: float, wanted: tuple[str, ...], without: set[str] | None = None) -> str | None:
        there = sorted(
            job_id
            for job_id, status in self._statuses().items()
            if status in wanted and job_id not in (without or set())
        )
        return there[int(pick * len(there))] if there else None

    def _wrong(self, words: str) -> str:
        with self.ledger.lock:
            self.ledger.wrong.append(words)
        return words

    def until_known(self, method: str, path: str, **request: Any) -> httpx.Response | None:
        """The answer, 2xx or 4xx; None when the run is over before there is one."""
        while not self.stopped.is_set():
            try:
                reply = self._client.request(method, path, **request)
            except httpx.ConnectError:
                self._count("connection refused")
            except httpx.HTTPError:
                self._count("outcome unknown")
            else:
                if reply.status_code < 500:
                    return reply
                self._count(f"answer {reply.status_code}")
            time.sleep(RETRY_SECONDS)
        return None

    def get(self, path: str, **request: Any) -> httpx.Response:
        """For the time before and after the storm: the answer must come, and be 200. The server may have closed an idle
        connection while a busy machine kept us from using it: then on another one."""
        try:
            reply = self._client.get(path, **request)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            reply = self._client.get(path, **request)
        assert reply.status_code == 200, f"GET {path}: {reply.status_code} {reply.text[:300]}"
        return reply

    def upload(self, content: bytes, name: str, format: str | None = None) -> str:
        reply = self._client.post("/files", files={"file": (name, content)}, data={"format": format} if format else {})
        assert reply.status_code == 201, reply.text
        return str(reply.json()["id"])

    def _count(self, what: str) -> None:
        with self.ledger.lock:
            self.ledger.counts[what] += 1
