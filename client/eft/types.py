"""What the server answers with. `raw` keeps each answer as it came, with whatever a newer server adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eft.errors import ExitCode

FINAL = frozenset({"succeeded", "failed", "cancelled"})
UNFINISHED = ("queued", "preparing", "starting", "running", "pausing", "paused", "stopping")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed."""

    failure_class: str
    """`user`, `memory`, `machine` or `internal`."""
    code: str
    message: str
    field: str | None


@dataclass(frozen=True, slots=True)
class Progress:
    step: int
    total_steps: int
    epoch: float | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    name: str | None
    status: str
    reason: str | None
    """Why it is in this state, e.g. what a queued job waits for."""
    attempt: int
    created_at: str
    """ISO 8601, as are the other times."""
    started_at: str | None
    finished_at: str | None
    progress: Progress | None
    result: dict[str, Any] | None
    failure: Failure | None
    spec: dict[str, Any]
    """The resolved spec, with every default written out; empty in lists."""
    submitted: dict[str, Any] | None
    """The spec as it was sent; None in lists, and for steps of pipelines and runs of sweeps."""
    adjusted: dict[str, int]
    """Fields that runs changed for want of memory, e.g. `training.per_device_train_batch_size`; `spec` stays."""
    settled: dict[str, Any] | None
    """What `method: auto` came to, once the job has started: `rung`, `reason`, `rejected` and the axes in `spec`."""
    node: str | None
    slots: list[str]
    """The GPUs (or CPU slots) that it has now, of `get` and `list`; rank 0 is on the first."""
    queue: dict[str, Any] | None
    """While it waits, of `get` alone: position, code, reason, estimated_start, estimated_gpus."""
    raw: dict[str, Any] = field(repr=False)

    @property
    def finished(self) -> bool:
        return self.status in FINAL

    @property
    def tags(self) -> list[str]:
        return list(self.raw.get("tags") or ())

    @property
    def note(self) -> str | None:
        return self.raw.get("note")

    @property
    def tries(self) -> int:
        """How many times it was begun to train; 0 while that has not happened, or where the answer does not say."""
        return int(self.raw.get("training_attempts") or 0)

    @property
    def exit_code(self) -> ExitCode:
        """What a pipeline that waited for this job should see."""
        match self.status:
            case "failed":
                return ExitCode.FAILED
            case "cancelled":
                return ExitCode.CANCELLED
            case _:
                return ExitCode.OK

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Job:
        failure, progress = raw.get("failure"), raw.get("progress")
        return cls(
            id=raw["id"],
            name=raw.get("name"),
            status=raw["status"],
            reason=raw.get("reason"),
            attempt=raw.get("attempt", 0),
            created_at=raw["created_at"],
            started_at=raw.get("started_at"),
            finished_at=raw.get("finished_at"),
            progress=_progress(progress) if progress else None,
            result=raw.get("result"),
            failure=Failure(
                failure_class=failure.get("class", "internal"),
                code=failure.get("code", "unknown"),
                message=failure.get("message", ""),
                field=failure.get("field"),
            )
            if failure
            else None,
            spec=raw.get("spec") or {},
            submitted=raw.get("submitted"),
            adjusted=raw.get("adjusted") or {},
            settled=raw.get("settled"),
            node=raw.get("node"),
            slots=raw.get("slots") or [],
            queue=raw.get("queue"),
            raw=raw,
        )


def _progress(raw: dict[str, Any]) -> Progress | None:
    if "step" not in raw or "total_steps" not in raw:
        return None  # the bytes of a download while preparing
    return Progress(raw["step"], raw["total_steps"], raw.get("epoch"), raw.get("seconds_left"))


@dataclass(frozen=True, slots=True)
class File:
    id: str
    filename: str
    bytes: int
    sha256: str
    rows: int | None
    format: str | None
    created_at: str
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> File:
        return cls(
            id=raw["id"],
            filename=raw.get("filename") or "",
            bytes=raw["bytes"],
            sha256=raw["sha256"],
            rows=raw.get("rows"),
            format=raw.get("format"),
            created_at=raw["created_at"],
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Artifact:
    path: str
    """Relative, with `/` between its parts."""
    kind: str
    bytes: int
    sha256: str
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Artifact:
        return cls(raw["path"], raw.get("kind") or "file", raw["bytes"], raw["sha256"], raw)


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a job's history. `seq` counts within the job."""

    seq: int
    type: str
    time: str | None
    attempt: int | None
    data: dict[str, Any]
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Event:
        return cls(raw["seq"], raw["type"], raw.get("time"), raw.get("attempt"), raw.get("data") or {}, raw)


@dataclass(frozen=True, slots=True)
class Slot:
    id: str
    kind: str
    busy: bool
    job: str | None
    """None also for a job of another project."""
    quarantined: str | None


@dataclass(frozen=True, slots=True)
class Drained:
    since: str
    by: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Node:
    """A box that runs jobs."""

    name: str
    state: str
    """serving, draining (jobs are still leaving), drained, or silent."""
    version: str
    slots: list[Slot]
    heartbeat_seconds: float
    drained: Drained | None
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Node:
        drained = raw.get("drained")
        return cls(
            name=raw["name"],
            state=raw["state"],
            version=raw.get("version") or "",
            slots=[
                Slot(slot["id"], slot["kind"], slot.get("busy", False), slot.get("job"), slot.get("quarantined"))
                for slot in raw.get("slots", [])
            ],
            heartbeat_seconds=raw.get("heartbeat_seconds", 0.0),
            drained=Drained(drained["since"], drained.get("by"), drained.get("reason") or "") if drained else None,
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class LogChunk:
    text: str
    attempt: int
    """Attempt that wrote this log; 0 before the first."""
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


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """One step of a pipeline."""

    name: str
    status: str
    """`waiting` until its job is submitted; then the status of the job."""
    job: str | None
    """Id of its job."""
    gates: list[dict[str, Any]]
    """`metric`, `min`, `max`, and once the job has succeeded `value` and `passed`."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Jobs one after another."""

    id: str
    name: str | None
    status: str
    """running, succeeded, failed or cancelled."""
    reason: str | None
    """Why it is in this state."""
    steps: list[PipelineStep]
    retry_of: str | None
    created_at: str
    finished_at: str | None
    raw: dict[str, Any] = field(repr=False)

    @property
    def finished(self) -> bool:
        return self.status in FINAL

    @property
    def exit_code(self) -> ExitCode:
        """What a script that waited for it should see."""
        return {"failed": ExitCode.FAILED, "cancelled": ExitCode.CANCELLED}.get(self.status, ExitCode.OK)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Pipeline:
        return cls(
            id=raw["id"],
            name=raw.get("name"),
            status=raw["status"],
            reason=raw.get("reason"),
            steps=[PipelineStep(one["name"], one["status"], one["job"], one["gates"]) for one in raw["steps"]],
            retry_of=raw.get("retry_of"),
            created_at=raw["created_at"],
            finished_at=raw.get("finished_at"),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class Page:
    """A page of jobs; `next` is the cursor of the one after it."""

    jobs: list[Job]
    next: str | None
    raw: dict[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One job with other values, run by run."""

    id: str
    name: str | None
    status: str
    """running, succeeded (a run has), failed or cancelled."""
    reason: str | None
    """How far it is."""
    best: str | None
    """Id of the job with the best value so far."""
    runs: list[dict[str, Any]]
    """`job`, `name`, `status`, `reason`, `point`, `value` and `best` of each."""
    raw: dict[str, Any] = field(repr=False)

    @property
    def finished(self) -> bool:
        return self.status in FINAL

    @property
    def exit_code(self) -> ExitCode:
        """What a script that waited for it should see."""
        return {"failed": ExitCode.FAILED, "cancelled": ExitCode.CANCELLED}.get(self.status, ExitCode.OK)

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Sweep:
        return cls(
            id=raw["id"],
            name=raw.get("name"),
            status=raw["status"],
            reason=raw.get("reason"),
            best=raw.get("best"),
            runs=raw["runs"],
            raw=raw,
        )
