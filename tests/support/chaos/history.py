"""All that a run has left behind, gathered from outside: HTTP, plain SQL, the run folders, /proc."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.chaos.look import Seen, Tables, document
from tests.support.chaos.people import Ledger, People

WEIGHTS = "adapter/adapter_model.safetensors"
TEMPORARY = ("tmp-", ".partial", ".part", ".tmp", ".probe")
"""What a name of unfinished work begins or ends with, anywhere below the data root."""


@dataclass(slots=True)
class Row:
    """A job as its row says."""

    status: str
    name: str | None
    retry_of: str | None
    attempt: int
    event_seq: int
    leased: bool
    """Worker or lease are still set."""


@dataclass(slots=True)
class Told:
    """An event of the database."""

    seq: int
    attempt: int
    type: str
    time: float
    data: dict[str, Any]


@dataclass(slots=True)
class Span:
    """A row of attempts or of allocations: who held which slot, from when to when, by the database's clock."""

    job_id: str
    attempt: int
    node: str
    slot: str
    start: float
    end: float | None


@dataclass(frozen=True, slots=True)
class Closed:
    """A slot, or a node, on which nothing was to be claimed; by the database's clock."""

    node: str
    slot: str | None
    """None: all of the node's."""
    since: float
    until: float | None
    what: str


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """From `at` on so many jobs of the project may run at once."""

    at: float
    max_running: int | None


@dataclass(slots=True)
class Folder:
    """A run folder."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """events.jsonl."""
    files: list[tuple[str, float]] = field(default_factory=list)
    """(path, time of the last change)."""
    bad_checkpoints: list[str] = field(default_factory=list)
    """With a checkpoint's name, and not whole; or set aside as damaged."""
    checkpoints: int = 0


@dataclass(slots=True)
class Result:
    """What HTTP hands out of a job that has succeeded."""

    weights: str
    """SHA-256."""
    losses: list[list[float]]
    faults: list[str] = field(default_factory=list)
    """Artifacts that are not what the list says."""


@dataclass(slots=True)
class Chained:
    """A pipeline as its rows say."""

    status: str
    steps: list[str | None]
    """Job of each step, in their order."""
    jobs: list[str] = field(default_factory=list)
    """Jobs that say that they are of it."""


@dataclass(slots=True)
class History:
    ledger: Ledger
    references: list[Result]
    """By the number of the spec."""
    jobs: dict[str, Row] = field(default_factory=dict)
    over_http: dict[str, str] = field(default_factory=dict)
    """Job id → status as the API says."""
    events: dict[str, list[Told]] = field(default_factory=dict)
    attempts: list[Span] = field(default_factory=list)
    allocations: list[Span] = field(default_factory=list)
    kinds: dict[tuple[str, int], str] = field(default_factory=dict)
    """(job, attempt) → prepare or train."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Job → slots that it trains on."""
    closed: list[Closed] = field(default_factory=list)
    quotas: list[QuotaSet] = field(default_factory=list)
    """By their times."""
    pipelines: dict[str, Chained] = field(default_factory=dict)
    outbox: int = 0
    folders: dict[tuple[str, int], Folder] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    seen: dict[str, list[Seen]] = field(default_factory=dict)
    """Events as they were seen while they were new."""
    observed: list[str] = field(default_factory=list)
    """What the observer has found, each as `invariant: words`."""
    samples: int = 0
    left: list[str] = field(default_factory=list)
    """Processes and temporary files that are still there after everything was stopped."""

    def spec_of(self, job_id: str) -> int | None:
        """The number of its spec, by the POST that made it or made the job it is a retry of; None: nobody knows."""
        while (parent := self.jobs[job_id].retry_of) is not None:
            job_id = parent
        known = self.ledger.accepted.get(job_id)
        return None if known is None else known[1]


def result(people: People, job_id: str) -> Result:
    listed = people.get(f"/jobs/{job_id}/artifacts").json()["data"]
    faults, weights = [], ""
    for artifact in listed:
        content = people.get(f"/jobs/{job_id}/artifacts/{artifact['path']}").content
        digest = hashlib.sha256(content).hexdigest()
        if digest != artifact["sha256"] or len(content) != artifact["bytes"]:
            faults.append(f"{job_id}: {artifact['path']} is not the file that the list describes")
        if artifact["path"] == WEIGHTS:
            weights = digest
    losses = people.get(f"/jobs/{job_id}/metrics", params={"names": "loss"}).json()["loss"]
    return Result(weights, losses, faults)


def gather(history: History, tables: Tables, people: People, data: Path) -> None:
    """While the service still runs, and all is quiet."""
    for job_id, status, name, retry_of, attempt, seq, worker, lease, spec in tables.rows(
        "SELECT id, status, name, retry_of, attempt, event_seq, worker, lease_until, spec FROM jobs"
    ):
        leased = worker is not None or lease is not None
        history.jobs[job_id] = Row(status, name, retry_of, attempt, seq, leased)
        history.gpus[job_id] = document(spec)["resources"]["gpus"]
        history.events[job_id] = []
    for job_id, *row, data_ in tables.rows("SELECT job_id, seq, attempt, type, time, data FROM events ORDER BY seq"):
        history.events.setdefault(job_id, []).append(Told(*row, document(data_)))
    spans = "SELECT job_id, attempt, node, slot, {}, {} FROM {} ORDER BY job_id, attempt"
    history.attempts = [Span(*row) for row in tables.rows(spans.format("started_at", "ended_at", "attempts"))]
    history.allocations = [Span(*row) for row in tables.rows(spans.format("created_at", "released_at", "allocations"))]
    for job_id, attempt, kind in tables.rows("SELECT job_id, attempt, kind FROM attempts"):
        history.kinds[job_id, attempt] = kind
    for pipeline_id, status in tables.rows("SELECT id, status FROM pipelines"):
        history.pipelines[pipeline_id] = Chained(status, [])
    for pipeline_id, job_id in tables.rows("SELECT pipeline_id, job_id FROM pipeline_steps ORDER BY number"):
        history.pipelines[pipeline_id].steps.append(job_id)
    for job_id, pipeline_id in tables.rows("SELECT id, pipeline_id FROM jobs WHERE pipeline_id IS NOT NULL"):
        history.pipelines[pipeline_id].jobs.append(job_id)
    _gather_wishes(history, tables)
    ((history.outbox,),) = tables.rows("SELECT count(*) FROM outbox")
    for job_id, row in history.jobs.items():
        history.over_http[job_id] = people.get(f"/jobs/{job_id}").json()["status"]
        if row.status == "succeeded":
            history.results[job_id] = result(people, job_id)


def _gather_wishes(history: History, tables: Tables) -> None:
    """What people took for themselves: holds have rows, drains of nodes and quotas have the audit's."""
    for node, slot, kind, since, until, released in tables.rows(
        "SELECT node, slot, kind, created_at, until, released_at FROM holds"
    ):
        ends = [end for end in (until, released) if end is not None]
        history.closed.append(Closed(node, slot, since, min(ends, default=None), kind))
    begun: dict[str, float] = {}
    for action, target, at, data in tables.rows(
        "SELECT action, target, time, data FROM audit "
        "WHERE action IN ('node.drain', 'node.undrain', 'limits.set') ORDER BY time, id"
    ):
        match action:
            case "node.drain":
                begun[target] = at
            case "node.undrain":
                history.closed.append(Closed(target, None, begun.pop(target), at, "node drain"))
            case "limits.set" if "max_running" in document(data):
                history.quotas.append(QuotaSet(at, document(data)["max_running"]))
    history.closed += [Closed(node, None, since, None, "node drain") for node, since in begun.items()]


def gather_files(history: History, data: Path) -> None:
    """After everything was stopped."""
    for path in sorted((data / "runs").glob("*/attempt-*")):
        history.folders[path.parent.name, int(path.name.removeprefix("attempt-"))] = _folder(path)
    for path in data.rglob("*"):
        if path.name == ".partial" and not any(path.iterdir()):
            continue  # the cache of models keeps an empty folder for work in progress
        if path.name.startswith(TEMPORARY) or path.name.endswith(TEMPORARY):
            history.left.append(f"left on the disk: {path.relative_to(data)}")
    memory = [path for job in history.jobs for path in Path("/dev/shm").glob(f"eft-*/{job}")]
    history.left += [f"left in memory: {path}" for path in memory]


def _folder(path: Path) -> Folder:
    found = Folder()
    for file in path.rglob("*"):
        if file.is_file():
            found.files.append((str(file.relative_to(path)), file.stat().st_mtime))
    events = path / "events.jsonl"
    if events.exists():
        found.lines = [json.loads(line) for line in events.read_bytes().splitlines()]
    for checkpoint in sorted((path / "checkpoints").glob("*")):
        if checkpoint.name.startswith("step-") and _whole(checkpoint):
            found.checkpoints += 1
        elif not checkpoint.name.startswith("tmp-"):
            found.bad_checkpoints.append(checkpoint.name)
    return found


def _whole(checkpoint: Path) -> bool:
    manifest = checkpoint / "manifest.json"
    if not manifest.is_file():
        return False
    files = json.loads(manifest.read_bytes())["files"]
    return {entry.name for entry in checkpoint.iterdir()} == {*files, "manifest.json"} and all(
        hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == wanted["sha256"]
        for name, wanted in files.items()
    )
