"""The end of an attempt: what the child left behind becomes the job's next state, exactly once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import delete, insert, null, select
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import Artifact, Job
from core.jobs.admission import auto_method, oom_backoff
from core.jobs.admission.ready import ready
from core.jobs.base import outbox
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Token, move
from core.jobs.kinds import Kind
from core.jobs.lifecycle.registry import entries
from core.jobs.lifecycle.requeue import release
from core.jobs.policies import disk_room, nodes
from core.jobs.scheduling import preempt
from core.plan import steps
from core.spec.job import JobSpec
from core.spec.run.events import FailureClass
from core.spec.run.exit_codes import EXIT_CHECKPOINTED


@dataclass(frozen=True, slots=True)
class Succeeded:
    """Training: `result` is what the job answers. Preparing: where the model lies."""

    result: dict[str, Any]
    artifacts: Sequence[Mapping[str, Any]] = ()
    kind: Literal["succeeded"] = "succeeded"


@dataclass(frozen=True, slots=True)
class Failed:
    failure: FailureClass
    code: str
    message: str
    field: str | None = None
    prepare_again: bool = False
    """Its model has vanished: a retry begins by bringing it again."""
    kind: Literal["failed"] = "failed"


@dataclass(frozen=True, slots=True)
class Requeued:
    """The child left on request with everything saved: for a cancel, or because its worker is leaving."""

    why: str
    kind: Literal["handed_back"] = "handed_back"


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A disk was full. This uses up no retry: the job waits until there is room."""

    why: str
    needs_bytes: int | None = None
    """What must be free before another try makes sense; None: unknown."""
    kind: Literal["no_room"] = "no_room"


Outcome = Succeeded | Failed | Requeued | NoRoom


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Faults of the box are tried again; a user's are not, since they would fail again."""

    max_machine_failures: int = 3
    backoff_seconds: float = 10.0
    no_room_seconds: float = 60.0
    """Between the first two tries while a disk is full in a way that the free bytes do not show: a quota, say."""
    no_room_max_seconds: float = 3600.0
    """The wait is doubled with each further try, up to this."""
    memory_check: bool = True
    """Fail a job that by its plan fits no slot as soon as its model is ready, before it waits for one."""


def finish(
    session: Session, token: Token, kind: Kind, outcome: Outcome, exit_code: int | None, policy: RetryPolicy
) -> Status | None:
    """Write the outcome of an attempt whose processes are gone. Returns the new state.

    None: the token is stale, somebody else has the job, nothing was written.
    """
    job = session.execute(select(Job).where(*token.holds()).with_for_update()).scalar_one_or_none()
    if job is None:
        return None
    before = Status(job.status)
    if before is Status.STARTING and isinstance(outcome, Succeeded):
        move(session, job, Status.RUNNING, reason=f"runs on {job.node}", guards=token.holds())
        session.refresh(job)
    planned: dict[str, Any] = {}
    if kind == Kind.PREPARE and isinstance(outcome, Succeeded):
        known = ready(session, job, outcome.result, memory_check=policy.memory_check)
        planned = {"queue_key": known.queue_key}
        outcome = replace(outcome, result=known.prepared)
        if (refused := known.refused) is not None:
            outcome = Failed("user", refused.code, refused.message, refused.field)
    after, reason, values, data = _next(job, kind, outcome, policy)
    values = values | planned
    if after is Status.QUEUED and job.stop_requested == StopReason.DRAIN and isinstance(outcome, Requeued):
        data = nodes.drained_by(session, job.node)
    if after is Status.QUEUED and job.stop_requested == StopReason.PREEMPT and isinstance(outcome, Requeued):
        assert job.preempted is not None  # both are written together
        reason = f"made room and waits to continue: {preempt.words(job.preempted, job.project_id)}"
    if not move(session, job, after, reason=reason, guards=token.holds(), values=values, data=data):
        return None
    if isinstance(outcome, Succeeded) and after is Status.SUCCEEDED:
        _list_artifacts(session, job, token, outcome.artifacts)
        entries.register(session, job, [artifact["path"] for artifact in outcome.artifacts])
    if after is Status.QUEUED:
        outbox.ring(session, token.job_id)
    release(
        session,
        token.job_id,
        token.attempt,
        f"{outcome.kind}: {reason}",
        exit_code,
        paced=exit_code == EXIT_CHECKPOINTED,
    )
    return after


def _next(
    job: Job, kind: Kind, outcome: Outcome, policy: RetryPolicy
) -> tuple[Status, str, dict[str, Any], dict[str, Any]]:
    """State, words, columns and event data that follow from an outcome. A job that was asked to stop or to pause keeps
    the reason of that: who asked, or what its sweep found."""
    asked = job.reason
    if Status(job.status) is Status.STOPPING:
        return Status.CANCELLED, asked, {}, {}
    pausing = Status(job.status) is Status.PAUSING
    match outcome:
        case Succeeded() if kind == Kind.PREPARE and pausing:
            return Status.PAUSED, f"{asked}; its model is ready", _got_on | {"prepared": outcome.result}, {}
        case Succeeded() if kind == Kind.PREPARE:
            return Status.QUEUED, "its model is ready; waits for a slot", _got_on | {"prepared": outcome.result}, {}
        case Succeeded():
            return Status.SUCCEEDED, "finished", {"result": outcome.result}, {}
        case Requeued() if pausing and kind == Kind.SERVING:
            return Status.PAUSED, "left its slot: the next request brings it back", {}, {}
        case Requeued() if pausing and kind == Kind.SESSION:
            return Status.PAUSED, "parked: the next operation brings it back", {}, {}
        case Requeued() if pausing:
            return Status.PAUSED, asked, {}, {}
        case Requeued():
            return Status.QUEUED, f"waits to continue: {outcome.why}", {}, {}
        case NoRoom() if pausing:
            return Status.PAUSED, f"{asked}; {outcome.why}", {"needs_bytes": outcome.needs_bytes}, {}
        case NoRoom():
            return _no_room(job, outcome, policy)
        case Failed(failure="memory") if kind == Kind.TRAIN and (lighter := _lighter(job, outcome)) is not None:
            changes, reason = lighter
            data = {"failure": _failure(outcome), "adjusted": changes}
            values: dict[str, Any] = {"adjusted": {**(job.adjusted or {}), **changes}}
            if pausing:
                return Status.PAUSED, f"{asked}; {reason}", values, data
            return Status.QUEUED, reason, values, data
        case Failed(failure="memory", field=steps.BATCH) if kind == Kind.TRAIN:
            failure = _failure(outcome) | {"message": _lightest(job)}
            return Status.FAILED, failure["message"], {"failure": failure}, {"failure": failure}
        case Failed():
            failure = _failure(outcome)
            why = " ".join(outcome.message.split())  # a reason is one line of a table; the failure keeps its lines
            failures = job.machine_failures + (outcome.failure == "machine")
            if outcome.failure == "machine" and failures <= policy.max_machine_failures:
                again = {"prepared": null()} if outcome.prepare_again else {}
                if pausing:
                    words = f"{asked}, after a machine error ({why})"
                    return Status.PAUSED, words, {"machine_failures": failures} | again, {"failure": failure}
                wait = policy.backoff_seconds * 2 ** (failures - 1)
                return (
                    Status.QUEUED,
                    f"retried after a machine error ({why}); retry {failures} of {policy.max_machine_failures}",
                    {"machine_failures": failures, "not_before": db_now() + wait} | again,
                    {"failure": failure},
                )
            return (
                Status.FAILED,
                why,
                {"failure": failure, "machine_failures": failures},
                {"failure": failure},
            )


_got_on: dict[str, Any] = {"losses": 0, "full_disks": 0, "needs_bytes": None}
"""A prepared model counts as progress, as a new checkpoint does (core/jobs/lifecycle/relay.py)."""


def _no_room(job: Job, outcome: NoRoom, policy: RetryPolicy) -> tuple[Status, str, dict[str, Any], dict[str, Any]]:
    """Wait until `needs_bytes` are free. Where that is unknown, or was no help the last time, also for a while that
    doubles: each try may load a model for minutes only to meet the same disk."""
    full_disks = job.full_disks + 1
    values: dict[str, Any] = {"full_disks": full_disks, "needs_bytes": outcome.needs_bytes}
    before = full_disks - 1 if outcome.needs_bytes is None else full_disks - 2
    if before >= 0:
        wait = min(policy.no_room_seconds * 2 ** min(before, 20), policy.no_room_max_seconds)
        values["not_before"] = db_now() + wait
    failure = _failure(Failed("machine", "no_space", outcome.why))
    data = {"failure": failure, "needs_bytes": outcome.needs_bytes}
    return Status.QUEUED, f"{disk_room.WAITS}: {outcome.why}", values, data


def _lighter(job: Job, outcome: Failed) -> tuple[dict[str, int], str] | None:
    """What the next attempt changes to need less memory, and the words for it; None: there is nothing to change."""
    changes = oom_backoff.smaller(_as_it_runs(job), outcome.field)
    if changes is None:
        return None
    return changes, f"was out of memory; continues with {oom_backoff.words(changes)} (every step sees the same rows)"


def _as_it_runs(job: Job) -> JobSpec:
    return auto_method.effective(job.spec, job.settled, job.adjusted or {})


def _lightest(job: Job) -> str:
    size, field, _ = steps.micro_batch(_as_it_runs(job))
    return (
        f"out of memory while training with {field} = {size}, and it cannot be "
        "cut any further: lower training.max_length, set memory.gradient_checkpointing, train adapters instead of all "
        "parameters, or take a smaller model"
    )


def _failure(outcome: Failed) -> dict[str, Any]:
    return {"class": outcome.failure, "code": outcome.code, "message": outcome.message, "field": outcome.field}


def _list_artifacts(session: Session, job: Job, token: Token, artifacts: Sequence[Mapping[str, Any]]) -> None:
    session.execute(delete(Artifact).where(Artifact.job_id == token.job_id))
    for artifact in artifacts:
        session.execute(
            insert(Artifact).values(
                job_id=token.job_id,
                owner_id=job.owner_id,
                project_id=job.project_id,
                attempt=token.attempt,
                path=artifact["path"],
                kind=artifact["kind"],
                bytes=artifact["bytes"],
                sha256=artifact["sha256"],
            )
        )
