"""Birth of a job, and a user's wish to stop it."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import insert, select
from sqlalchemy.orm import Session

from core.db.tables import Event, Job, User
from core.errors import Conflict, NotFound
from core.ids import new_id
from core.jobs.admission import branches, dependencies, parents
from core.jobs.admission.rollouts import reward_models
from core.jobs.base import outbox
from core.jobs.base.slots import Key, Needs
from core.jobs.base.states import FINAL, Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.base.transitions import Actor, move
from core.jobs.policies import audit, disk_room, quotas, volume
from core.jobs.policies.volume import NO_BOUNDS, VolumeLimits
from core.spec.job import JobSpec
from core.spec.run.chain import ModelChain

__all__ = ["Actor", "cancel", "find", "pause", "resume", "retry", "submit"]

SubmittedKind = Literal["train", "preview", "export", "session", "serving", "trial"]

BELOW_ALL = -101
"""Priority of a serving: that of no job is as low."""
ASKED = {
    "train": "job.submit",
    "preview": "preview.ask",
    "export": "model.export",
    "session": "session.create",
    "serving": "serving.start",
    "trial": "rewards.try",
}
"""Names of the actions in the audit."""


def submit(
    session: Session,
    actor: Actor,
    spec: JobSpec,
    *,
    kind: SubmittedKind = "train",
    submitted: dict[str, Any] | None = None,
    retry_of: Job | None = None,
    chain: ModelChain | None = None,
    pipeline_id: str | None = None,
    sweep: tuple[str, dict[str, Any]] | None = None,
    bounds: VolumeLimits = NO_BOUNDS,
) -> Job:
    """Insert a resolved, checked spec as a queued job: row, event and doorbell in the caller's transaction.

    `submitted`: the spec as it was sent, for people; a retry has that of its job. `sweep`: the sweep that it is a run
    of, and the fields that are this run's. With `retry_of` it may go on from the checkpoints of that job, and of those
    that one was a retry of, or begin with the checkpoint that its spec names. `chain` is what an export starts from.
    Raises SpecError for a priority above the project's limit and for a job in `after` that can never let it start,
    NotFound or SpecError where its model is a job that there is no going on from, and QueueFull or SpecsFull beyond
    `bounds`.
    """
    priority = _priority(session, actor, spec, kind, retry_of)
    after = dependencies.pin(session, actor.project_id, spec.after) if retry_of is None else []
    origin = _origin(session, actor, spec, kind, retry_of, chain)
    document = spec.model_dump(mode="json")
    _require_volume(session, actor, document, kind, bounds)
    job_id = new_id("job" if kind == "train" else kind)
    session.add(
        Job(
            id=job_id,
            kind=kind,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            name=spec.name,
            tags=spec.tags,
            note=spec.note or None,
            spec=document,
            submitted=submitted if retry_of is None else retry_of.submitted,
            accelerator=spec.resources.accelerator,
            priority=priority,
            bound_seconds=spec.resources.max_runtime_seconds,
            queue_key=str(Key(Needs.of(spec.resources), actor.project_id, actor.user_id, priority)),
            request_id=actor.request_id,
            pipeline_id=pipeline_id,
            sweep_id=None if sweep is None else sweep[0],
            sweep_point=None if sweep is None else sweep[1],
            status=Status.QUEUED.value,
            unmet=len(after),
            reason=disk_room.WAITS_FOR_MODEL,
            event_seq=1,
            **origin,
        )
    )
    session.flush()
    _first_event(session, actor, job_id, retry_of)
    job = session.execute(select(Job).where(Job.id == job_id).execution_options(populate_existing=True)).scalar_one()
    if after:
        dependencies.write_down(session, job, after)
        job.reason = dependencies.words(session, job_id)
        session.flush()
    told = {"name": spec.name} | ({} if retry_of is None else {"retry_of": retry_of.id})
    audit.record(session, actor, ASKED[kind], job_id, told)
    outbox.ring(session, job_id)
    return job


def _priority(session: Session, actor: Actor, spec: JobSpec, kind: SubmittedKind, retry_of: Job | None) -> int:
    priority = spec.priority if kind in ("train", "session", "trial") else BELOW_ALL if kind == "serving" else 0
    if retry_of is not None:  # accepted once; the limit may have been lowered since
        return min(retry_of.priority, quotas.max_priority(session, actor.project_id))
    quotas.check_priority(session, actor.project_id, priority)
    return priority


def _require_volume(
    session: Session, actor: Actor, document: dict[str, Any], kind: SubmittedKind, bounds: VolumeLimits
) -> None:
    volume.add(session, actor.project_id, document, bounds)
    if kind == "preview":
        volume.require_preview(session, actor.project_id, actor.user_id, bounds)
    else:
        volume.require_room(session, actor.project_id, bounds, kind)


def _origin(
    session: Session, actor: Actor, spec: JobSpec, kind: SubmittedKind, retry_of: Job | None, chain: ModelChain | None
) -> dict[str, Any]:
    """Columns that say what the job starts from: a job before it, its checkpoints, its weights."""
    empty = dict.fromkeys(("retry_of", "chain", "lineage", "reward_models", "adjusted", "settled"))
    columns: dict[str, Any] = {**empty, "resume_from": []}
    if retry_of is not None:
        columns = {name: getattr(retry_of, name) for name in columns} | {"retry_of": retry_of.id}
        columns["resume_from"] = [*retry_of.resume_from, {"job": retry_of.id, "attempts": retry_of.attempt}]
    begins = branches.pin(session, actor.project_id, spec) if retry_of is None and kind == "train" else {}
    columns |= begins
    if retry_of is None and kind in ("train", "trial"):
        columns["reward_models"] = reward_models.pin(session, actor.project_id, spec)
    elif columns["reward_models"] is not None:
        reward_models.require(session, actor.project_id, columns["reward_models"])
    if chain is not None:
        return columns | {"chain": chain.model_dump(mode="json"), "lineage": None}
    if retry_of is None and not begins:
        pinned = parents.pin(session, actor.project_id, spec)
        return columns if pinned is None else columns | {"chain": pinned.chain, "lineage": pinned.lineage}
    if columns["chain"] is not None:
        parents.require(session, actor.project_id, columns["chain"])
    return columns


def _first_event(session: Session, actor: Actor, job_id: str, retry_of: Job | None) -> None:
    session.execute(
        insert(Event).values(
            job_id=job_id,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            seq=1,
            attempt=0,
            type="status",
            data={
                "from": None,
                "to": "queued",
                "reason": "submitted" if retry_of is None else f"submitted as a retry of {retry_of.id}",
                "actor": actor.user_id,
                "request_id": actor.request_id,
            },
        )
    )


def find(session: Session, actor: Actor, job_id: str, *, lock: bool = False) -> Job:
    """Get a job of the actor's project. Raises NotFound if it is missing or another project's."""
    query = select(Job).where(Job.id == job_id, Job.project_id == actor.project_id, Job.kind == "train")
    job = session.execute(query.with_for_update() if lock else query).scalar_one_or_none()
    if job is None:
        raise NotFound(f"there is no job `{job_id[:60]}` in this project", field="job_id")
    return job


def cancel(session: Session, actor: Actor, job_id: str, *, why: str | None = None) -> Job:
    """Cancel a job: at once while it waits; otherwise its worker ends the trainer.

    Asking twice is fine. `why`: the reason that the job shows. Raises Conflict for a job that has succeeded or failed.
    """
    return stop(session, actor, find(session, actor, job_id, lock=True), why=why)


def stop(session: Session, actor: Actor, job: Job, *, why: str | None = None) -> Job:
    """As `cancel`, of a row that the caller has read."""
    match Status(job.status):
        case Status.CANCELLED | Status.STOPPING:
            return job
        case Status.QUEUED | Status.PAUSED:
            reason = why or f"cancelled by {_who(session, actor, job)}"
            _ask(session, actor, "cancel", job, Status.CANCELLED, reason)
        case status if status in FINAL:
            raise Conflict(f"the job has already {status.value}; there is nothing to cancel", code="already_final")
        case _:
            _ask(
                session,
                actor,
                "cancel",
                job,
                Status.STOPPING,
                why or f"cancelled by {_who(session, actor, job)}",
                stop=StopReason.CANCEL,
            )
    session.refresh(job)
    return job


def pause(session: Session, actor: Actor, job_id: str, *, why: str | None = None) -> Job:
    """Free what a job holds and keep what it has done: its trainer writes a checkpoint and leaves.

    Asking twice is fine. Raises Conflict for a job that has ended or is being cancelled.
    """
    job = find(session, actor, job_id, lock=True)
    match Status(job.status):
        case Status.PAUSED | Status.PAUSING:
            return job
        case Status.QUEUED:
            _ask(session, actor, "pause", job, Status.PAUSED, why or f"paused by {_who(session, actor, job)}")
        case Status.PREPARING | Status.STARTING | Status.RUNNING:
            _ask(
                session,
                actor,
                "pause",
                job,
                Status.PAUSING,
                why or f"paused by {_who(session, actor, job)}",
                stop=StopReason.PAUSE,
            )
        case status:
            raise Conflict(f"the job {_stands(status)}; there is nothing to pause", code="not_pausable")
    session.refresh(job)
    return job


def _stands(status: Status) -> str:
    if status == Status.CANCELLED:
        return "was cancelled"
    return f"has already {status.value}" if status in FINAL else f"is {status.value}"


def resume(session: Session, actor: Actor, job_id: str, *, why: str | None = None) -> Job:
    """Queue a paused job again, from its newest checkpoint. Raises Conflict if it is not paused."""
    job = find(session, actor, job_id, lock=True)
    match Status(job.status):
        case Status.PAUSED:
            _ask(
                session,
                actor,
                "resume",
                job,
                Status.QUEUED,
                f"{why or f'resumed by {_who(session, actor, job)}'}; waits for a slot",
            )
            outbox.ring(session, job_id)
        case Status.PAUSING:
            raise Conflict("the job is still writing its checkpoint; resume it once it is paused", code="still_pausing")
        case Status.QUEUED | Status.PREPARING | Status.STARTING | Status.RUNNING:
            return job
        case status:
            raise Conflict(f"the job {_stands(status)}; only a paused job can be resumed", code="not_paused")
    session.refresh(job)
    return job


def retry(
    session: Session,
    actor: Actor,
    job_id: str,
    bounds: VolumeLimits = NO_BOUNDS,
    *,
    max_runtime_seconds: int | None = None,
) -> Job:
    """Submit a failed or cancelled job's spec as a new job, which continues from the old one's newest checkpoint.

    It is a new job, because a final status never changes. `max_runtime_seconds` replaces the time limit; nothing else
    may change, because the new job continues the old one's steps. Asked again while that one has not failed too, it
    answers the same. Raises Conflict for a job in any other state, and where a retry with another time limit is under
    way; QueueFull and SpecsFull.
    """
    old = find(session, actor, job_id, lock=True)
    if Status(old.status) not in (Status.FAILED, Status.CANCELLED):
        words = f"the job {_stands(Status(old.status))}; only a failed or cancelled job can be retried"
        raise Conflict(words, code="not_ended")
    query = select(Job).where(Job.retry_of == job_id, Job.status.not_in((Status.FAILED, Status.CANCELLED)))
    going = session.execute(query.limit(1)).scalar_one_or_none()
    if going is not None:
        if max_runtime_seconds not in (None, going.spec["resources"].get("max_runtime_seconds")):
            raise Conflict(f"`{going.id}` retries this job already, with another time limit", code="retried_already")
        return going
    spec = JobSpec.model_validate(old.spec)
    if max_runtime_seconds is not None:
        resources = spec.resources.model_copy(update={"max_runtime_seconds": max_runtime_seconds})
        spec = spec.model_copy(update={"resources": resources})
    return submit(session, actor, spec, retry_of=old, bounds=bounds)


def _ask(
    session: Session, actor: Actor, verb: str, job: Job, after: Status, reason: str, *, stop: StopReason | None = None
) -> None:
    data = {"actor": actor.user_id, "request_id": actor.request_id}
    # Who leaves the queue gives up the slots that are kept for it, and comes back without them.
    values = {"reserved_at": None, "reserved_node": None} if stop is None else {"stop_requested": stop}
    told = {"from": job.status, "to": after.value}
    if move(session, job, after, reason=reason, data=data, values=values):
        audit.record(session, actor, f"job.{verb}", job.id, told)


def _who(session: Session, actor: Actor, job: Job) -> str:
    if actor.user_id == job.owner_id:
        return "its owner"
    return session.execute(select(User.name).where(User.id == actor.user_id)).scalar_one()
