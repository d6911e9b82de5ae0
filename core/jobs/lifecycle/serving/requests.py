"""Requests to served models: a row while they wait and are answered, and pieces of their answers. Both go once the
caller has them, or is no longer there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from core.db.engine import db_now
from core.db.tables import CompletionPiece, CompletionRow, Job, ServingRow
from core.errors import EftError
from core.ids import new_id
from core.jobs.base.scheduler_lock import lock_scheduler
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor, Token
from core.jobs.lifecycle import parking
from core.jobs.lifecycle.submit import submit
from core.jobs.policies.volume import NO_BOUNDS, QueueFull, VolumeLimits
from core.spec.job import JobSpec
from core.spec.run.chain import ModelChain
from core.spec.serving.request import CompletionRequest

KIND = "serving"
CAME = "a request came; waits for a slot"
GONE_SECONDS = 60.0
"""A request whose caller has not been there for so long is dropped."""


class Interrupted(EftError):
    """The process that answered ended before the answer did."""

    code = "serving_interrupted"
    status = 503


class Unserved(EftError):
    """The model cannot be served."""

    code = "serving_failed"
    status = 503


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it is now."""

    news: list[dict[str, Any]]
    """What came since the last look."""
    seen: int
    """For the next look."""
    parked: bool
    """Its serving has left its slot."""
    reason: str
    """What its serving does or waits for."""


def serving_of(session: Session, actor: Actor, base: str) -> Job | None:
    """The serving of a base (its hash) in the actor's project that has not ended."""
    query = (
        select(Job)
        .join(ServingRow, ServingRow.id == Job.id)
        .where(
            ServingRow.project_id == actor.project_id,
            ServingRow.base == base,
            Job.status.not_in([status.value for status in FINAL]),
        )
        .order_by(Job.id.desc())
        .limit(1)
    )
    return session.execute(query).scalar_one_or_none()


def ask(
    session: Session,
    actor: Actor,
    base: str,
    chain: ModelChain | None,
    job: JobSpec | None,
    request: CompletionRequest,
    *,
    streamed: bool,
    most: int = 0,
    bounds: VolumeLimits = NO_BOUNDS,
) -> str | None:
    """Write a request down and wake the serving of its base; the request's id. None: there is no serving yet and `job`,
    its resolved form, is needed.

    `base`: hash of the base; `chain`: what it is made of, where jobs have made it. Raises QueueFull beyond `most`
    requests of the project (0: no limit).
    """
    lock_scheduler(session)
    mine = select(func.count()).select_from(CompletionRow).where(CompletionRow.project_id == actor.project_id)
    if most and session.execute(mine).scalar_one() >= most:
        words = f"{most} requests of this project wait or are answered already (EFT_MAX_COMPLETIONS): ask again soon"
        raise QueueFull(words)
    serving = serving_of(session, actor, base)
    if serving is None:
        if job is None:
            return None
        serving = submit(session, actor, job, kind="serving", chain=chain, bounds=bounds)
        session.add(ServingRow(id=serving.id, owner_id=actor.user_id, project_id=actor.project_id, base=base))
        session.flush()
    number = new_id("cmpl")
    session.add(
        CompletionRow(
            id=number,
            serving_id=serving.id,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            request=request.model_dump(mode="json"),
            streamed=streamed,
        )
    )
    session.flush()
    _used(session, serving.id)
    parking.bring_back(session, serving, CAME)
    return number


def look(session: Session, number: str, seen: int) -> SeenRequest:
    """What came behind the first `seen` lots of pieces. Raises Interrupted and Unserved."""
    row = session.execute(
        select(CompletionRow.streamed, CompletionRow.attempt, Job)
        .join(Job, Job.id == CompletionRow.serving_id)
        .where(CompletionRow.id == number)
    ).one_or_none()
    if row is None:
        raise Interrupted("the request was dropped: no client seemed to wait for it")
    query = select(CompletionPiece).where(CompletionPiece.completion_id == number, CompletionPiece.number > seen)
    lots = session.execute(query.order_by(CompletionPiece.number)).scalars().all()
    found: list[dict[str, Any]] = [one for lot in lots for one in lot.content]
    job: Job = row.Job
    if not found:
        if Status(job.status) in FINAL:
            raise Unserved(f"the model is not served: {job.reason}")
        left = job.attempt != row.attempt or Status(job.status) in (Status.QUEUED, Status.PAUSED)
        if row.streamed and seen and row.attempt and left:
            raise Interrupted(f"the answer broke off, since its process ended ({job.reason}): ask again")
    parked = job.status == Status.PAUSED.value
    return SeenRequest(found, lots[-1].number if lots else seen, parked, job.reason)


def touch(session: Session, number: str) -> bool:
    """Note that the caller is there, and bring a parked serving back."""
    session.execute(
        update(CompletionRow)
        .where(CompletionRow.id == number)
        .values(seen_at=db_now())
        .execution_options(synchronize_session=False)
    )
    job = session.execute(
        select(Job)
        .join(CompletionRow, CompletionRow.serving_id == Job.id)
        .where(CompletionRow.id == number)
        .with_for_update()
    ).scalar_one_or_none()
    return job is not None and parking.bring_back(session, job, CAME)


def forget(session: Session, number: str) -> None:
    """Drop a request: it was answered, or its caller has gone."""
    session.execute(delete(CompletionPiece).where(CompletionPiece.completion_id == number))
    session.execute(delete(CompletionRow).where(CompletionRow.id == number))


def has_old(session: Session, seconds: float = GONE_SECONDS) -> bool:
    """Whether `forget_old` would drop any."""
    query = select(CompletionRow.id).where(CompletionRow.seen_at < db_now() - seconds)
    return session.execute(query.limit(1)).first() is not None


def forget_old(session: Session, seconds: float = GONE_SECONDS) -> int:
    """Drop requests whose callers have not been there for so long; how many."""
    old = session.execute(select(CompletionRow.id).where(CompletionRow.seen_at < db_now() - seconds)).scalars().all()
    for number in old:
        forget(session, number)
    return len(old)


# --- the worker's side


def due(session: Session, token: Token, limit: int = 64) -> Sequence[CompletionRow]:
    """Requests that this attempt has not been given yet, oldest first."""
    query = select(CompletionRow).where(
        CompletionRow.serving_id == token.job_id,
        or_(CompletionRow.attempt < token.attempt, CompletionRow.attempt.is_(None)),
    )
    return session.execute(query.order_by(CompletionRow.created_at, CompletionRow.id).limit(limit)).scalars().all()


def take(session: Session, token: Token, numbers: Sequence[str]) -> list[str]:
    """Give requests to this attempt: those that can be answered from their beginning. Others have been told a part of
    an answer by an earlier attempt, and their callers are told that it broke off."""
    if session.execute(select(Job.id).where(*token.holds())).one_or_none() is None:
        return []
    begun = select(CompletionPiece.completion_id).where(CompletionPiece.completion_id.in_(numbers))
    streamed = select(CompletionRow.id).where(CompletionRow.id.in_(begun), CompletionRow.streamed.is_(True))
    lost = set(session.execute(streamed).scalars())
    again = [number for number in numbers if number not in lost]
    session.execute(delete(CompletionPiece).where(CompletionPiece.completion_id.in_(again)))
    session.execute(
        update(CompletionRow)
        .where(CompletionRow.id.in_(numbers))
        .values(attempt=token.attempt)
        .execution_options(synchronize_session=False)
    )
    for number in lost:
        words = "the answer broke off, since its process ended: ask again"
        error = {"code": Interrupted.code, "message": words, "field": None}
        _append(session, number, [{"error": error}])
    return again


def tell(session: Session, token: Token, frames: Mapping[str, list[dict[str, Any]]]) -> bool:
    """Write down what the child has said, by request; False: this attempt has lost the serving."""
    if session.execute(select(Job.id).where(*token.holds()).with_for_update(read=True)).one_or_none() is None:
        return False
    known = set(session.execute(select(CompletionRow.id).where(CompletionRow.id.in_(frames))).scalars())
    for number, content in frames.items():
        if number in known:
            _append(session, number, content)
    _used(session, token.job_id)
    return True


def gone(session: Session, numbers: Sequence[str]) -> list[str]:
    """Those of these requests that were dropped."""
    known = set(session.execute(select(CompletionRow.id).where(CompletionRow.id.in_(numbers))).scalars())
    return [number for number in numbers if number not in known]


def park(session: Session, token: Token, why: str, idle_seconds: float | None = None) -> bool:
    """Ask the serving to leave its slot; `idle_seconds`: only where no request has come for so long."""
    job = parking.running(session, token, ServingRow)
    if job is None:
        return False
    if idle_seconds is not None and (
        not parking.unused(session, token, ServingRow, idle_seconds) or due(session, token, 1)
    ):
        return False
    return parking.leave(session, token, job, why)


def others_wait(session: Session, token: Token) -> bool:
    """Whether another serving waits for a slot."""
    query = select(Job.id).where(
        Job.kind == KIND, Job.status == Status.QUEUED.value, Job.prepared.is_not(None), Job.id != token.job_id
    )
    return session.execute(query.limit(1)).first() is not None


def _append(session: Session, number: str, content: list[dict[str, Any]]) -> None:
    last = select(func.coalesce(func.max(CompletionPiece.number), 0)).where(CompletionPiece.completion_id == number)
    place = int(session.execute(last).scalar_one()) + 1
    session.execute(insert(CompletionPiece).values(completion_id=number, number=place, content=content))


def _used(session: Session, serving_id: str) -> None:
    session.execute(
        update(ServingRow)
        .where(ServingRow.id == serving_id)
        .values(used_at=db_now())
        .execution_options(synchronize_session=False)
    )
