"""The log of a session: an operation that was accepted is a row with its tensors in the data root, and is computed
exactly once."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, undefer

from core.base.files import sync, write_private
from core.db.engine import Database, db_now
from core.db.tables import Job, SessionOperation, SessionRow
from core.errors import Conflict, NotFound
from core.jobs.base.states import FINAL, Status
from core.jobs.base.transitions import Actor, Token
from core.jobs.lifecycle import parking
from core.jobs.lifecycle.sessions import limits
from core.jobs.lifecycle.sessions.records import FoundSession, find
from core.jobs.policies.volume import QueueFull
from core.spec.session.job import SessionSpec
from core.storage.layout import Layout

WAITING = 10_000
"""Operations of one session that may wait at once."""
IN_ROWS = 16 << 10
"""Bytes of tensors up to which they lie in the row of their operation. Larger ones have a file, which costs three syncs
of the disk beside that of the transaction."""


def digest(operation: dict[str, Any], tensors: bytes) -> str:
    """SHA-256 by which the same operation is known again."""
    named = json.dumps(operation, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(len(named).to_bytes(8, "big") + named + tensors).hexdigest()


def tensors_path(folder: Path, position: int) -> Path:
    """Where the tensors of an operation lie; `folder` is that of the session."""
    return folder / "log" / f"{position:012d}.safetensors"


def result_path(folder: Path, position: int) -> Path:
    """Where the tensors of its result lie."""
    return folder / "results" / f"{position:012d}.safetensors"


def put_aside(folder: Path, tensors: bytes) -> Path | None:
    """Write tensors where `accept` takes them from, before any transaction; None for those that lie in their row."""
    if len(tensors) <= IN_ROWS:
        return None
    path = folder / "log" / f"new-{uuid.uuid4().hex}"
    write_private(path, tensors)
    return path


def accept(
    session: Session,
    actor: Actor,
    folder: Path,
    session_id: str,
    seq: int,
    operation: dict[str, Any],
    sha256: str,
    tensors: bytes,
    aside: Path | None,
    lane: str | None = None,
) -> tuple[FoundSession, SessionOperation]:
    """Write an operation into the log, behind all others, and bring a parked session back. `aside`: what `put_aside`
    has made of the tensors. The same number again is the same operation; `lane`: a row of numbers of its own, in the
    place of the model's. Raises Conflict for another operation under a known number and for a session that has ended,
    QueueFull for too many that wait, SessionQuota."""
    found, size = find(session, actor, session_id, lock=True), len(tensors)
    model = lane or operation.get("model") or ""
    if (known := _accepted(session, session_id, model, seq, sha256)) is not None:
        return found, known
    if Status(found.job.status) in FINAL:
        words = f"the session has ended ({found.status}: {found.job.reason}); make a new one"
        raise Conflict(words, field="session_id", code="session_ended")
    waiting = (
        select(func.count())
        .select_from(SessionOperation)
        .where(SessionOperation.session_id == session_id, SessionOperation.done_at.is_(None))
    )
    if session.execute(waiting).scalar_one() >= WAITING:
        raise QueueFull(f"{WAITING:,} operations of this session wait already: get their results first")
    limits.check_operation(session, found, operation, size)
    row = SessionOperation(
        session_id=session_id,
        owner_id=found.row.owner_id,
        project_id=found.row.project_id,
        position=found.row.positions + 1,
        model=model,
        seq=seq,
        operation=operation,
        sha256=sha256,
        tensor_bytes=size,
        tensors=tensors if tensors and aside is None else None,
        done_at=None,
        result=None,
        error=None,  # said, so that the row can be read without another look into the database
    )
    session.add(row)
    session.execute(
        update(SessionRow)
        .where(SessionRow.id == session_id)
        .values(positions=row.position, log_bytes=SessionRow.log_bytes + size, used_at=db_now())
        .execution_options(synchronize_session=False)
    )
    if aside is not None:
        aside.replace(tensors_path(folder, row.position))  # an earlier file there is of no row
        sync(folder / "log")
    session.flush()
    bring_back(session, found, actor)
    return found, row


def tensors_of(folder: Path, row: SessionOperation) -> bytes:
    """The tensors of an operation that `undone` has found; `folder` is that of the session."""
    if row.tensors is not None or not row.tensor_bytes:
        return row.tensors or b""
    return tensors_path(folder, row.position).read_bytes()


def _accepted(session: Session, session_id: str, model: str, seq: int, sha256: str) -> SessionOperation | None:
    """The operation that has this number already. Raises Conflict where it is another one."""
    known = session.execute(
        select(SessionOperation).where(
            SessionOperation.session_id == session_id, SessionOperation.model == model, SessionOperation.seq == seq
        )
    ).scalar_one_or_none()
    if known is not None and known.sha256 != sha256:
        words = f"operation {seq} of model `{model}` was a different one: a number always stands for the same operation"
        raise Conflict(words, field="seq", code="session_seq_reused")
    return known


def bring_back(session: Session, found: FoundSession, actor: Actor) -> None:
    """Queue a parked session again."""
    data = {"actor": actor.user_id, "request_id": actor.request_id}
    if parking.bring_back(session, found.job, "an operation came; waits for a slot", data):
        session.refresh(found.job)  # for those who tell of it


def get(session: Session, actor: Actor, session_id: str, position: int) -> tuple[FoundSession, SessionOperation]:
    """Raises NotFound for an operation that the session has not accepted."""
    found = find(session, actor, session_id)
    row = session.get(SessionOperation, (session_id, position))
    if row is None:
        raise NotFound(f"the session has accepted no operation {position}", field="position")
    return found, row


def undone(session: Session, session_id: str, beyond: int, limit: int = 64) -> Sequence[SessionOperation]:
    """Operations behind this position that are to be computed, in their order; those that were already, too."""
    query = select(SessionOperation).where(
        SessionOperation.session_id == session_id, SessionOperation.position > beyond
    )
    query = query.options(undefer(SessionOperation.tensors)).order_by(SessionOperation.position).limit(limit)
    return session.execute(query).scalars().all()


def answered(session: Session, session_id: str, least: int) -> tuple[str, list[int]]:
    """The status of a session, and the positions from `least` on whose results are there."""
    query = select(SessionOperation.position).where(
        SessionOperation.session_id == session_id,
        SessionOperation.position >= least,
        SessionOperation.done_at.is_not(None),
    )
    status = session.execute(select(Job.status).where(Job.id == session_id)).scalar_one()
    return status, [*session.execute(query).scalars()]


def answer(
    session: Session,
    token: Token,
    position: int,
    *,
    result: dict[str, Any] | None,
    error: dict[str, Any] | None,
    size: int,
    sha256: str | None,
) -> bool:
    """Write what an operation came to; False: this attempt has lost the session."""
    if session.execute(select(Job.id).where(*token.holds()).with_for_update(read=True)).one_or_none() is None:
        return False
    session.execute(
        update(SessionOperation)
        .where(
            SessionOperation.session_id == token.job_id,
            SessionOperation.position == position,
            SessionOperation.done_at.is_(None),
        )
        .values(result=result, error=error, result_bytes=size, result_sha256=sha256, done_at=db_now())
        .execution_options(synchronize_session=False)
    )
    session.execute(
        update(SessionRow)
        .where(SessionRow.id == token.job_id)
        .values(used_at=db_now(), log_bytes=SessionRow.log_bytes + size)
        .execution_options(synchronize_session=False)
    )
    return True


def snapshotted(session: Session, token: Token, position: int, forgotten: int) -> None:
    """Note the newest snapshot of a session, and up to which position no operation is computed again, so that their
    tensors go. It counts as progress: faults of the box before it are forgotten."""
    session.execute(
        update(Job)
        .where(*token.holds())
        .values(machine_failures=0, losses=0)
        .execution_options(synchronize_session=False)
    )
    session.execute(
        update(SessionRow)
        .where(SessionRow.id == token.job_id)
        .values(snapshot=position)
        .execution_options(synchronize_session=False)
    )
    _forget(session, token.job_id, forgotten)


def _forget(session: Session, session_id: str, position: int) -> None:
    """Count the tensors of operations up to this position no longer, and empty the rows that hold them."""
    beyond = select(SessionRow.forgotten).where(SessionRow.id == session_id).scalar_subquery()
    session.execute(
        update(SessionOperation)
        .where(
            SessionOperation.session_id == session_id,
            SessionOperation.position > beyond,
            SessionOperation.position <= position,
            SessionOperation.tensors.is_not(None),
        )
        .values(tensors=None)
        .execution_options(synchronize_session=False)
    )
    operations = select(func.coalesce(func.sum(SessionOperation.tensor_bytes), 0)).where(
        SessionOperation.session_id == session_id,
        SessionOperation.position > SessionRow.forgotten,
        SessionOperation.position <= position,
    )
    session.execute(
        update(SessionRow)
        .where(SessionRow.id == session_id, SessionRow.forgotten < position)
        .values(log_bytes=SessionRow.log_bytes - operations.scalar_subquery(), forgotten=position)
        .execution_options(synchronize_session=False)
    )


def remove_tensors(folder: Path, position: int) -> None:
    """Remove the tensors of operations up to this position."""
    for path in (folder / "log").glob("*.safetensors"):
        if int(path.stem) <= position:
            path.unlink(missing_ok=True)


def forget_ended(database: Database, layout: Layout, most: int = 100) -> int:
    """Remove the tensors of operations of sessions that have ended: nothing computes them again; how many sessions."""
    query = (
        select(SessionRow.id, SessionRow.positions)
        .join(Job, Job.id == SessionRow.id)
        .where(Job.status.in_([status.value for status in FINAL]), SessionRow.forgotten < SessionRow.positions)
        .limit(most)
    )
    with database.read() as session:
        ended = [(str(row[0]), int(row[1])) for row in session.execute(query)]
    for session_id, position in ended:
        remove_tensors(layout.session(session_id), position)
        with database.write() as session:
            _forget(session, session_id, position)
    return len(ended)


def park(session: Session, token: Token, idle_seconds: float) -> bool:
    """Ask a session that nobody has used for so long to leave its slot. False: it is in use."""
    job = parking.running(session, token, SessionRow)
    if job is None or not parking.unused(session, token, SessionRow, idle_seconds):
        return False
    waiting = select(SessionOperation.position).where(
        SessionOperation.session_id == token.job_id, SessionOperation.done_at.is_(None)
    )
    if session.execute(waiting.limit(1)).one_or_none() is not None:
        return False
    reason = f"idle for {idle_seconds:g} s: it is parked, and the next operation brings it back"
    return parking.leave(session, token, job, reason)


def spec_of(session: Session, session_id: str) -> SessionSpec:
    """The session as it was opened."""
    spec = session.execute(select(SessionRow.spec).where(SessionRow.id == session_id)).scalar_one()
    return SessionSpec.model_validate_json(json.dumps(spec))


def forget_results(database: Database, layout: Layout, hours: float, most: int = 1000) -> int:
    """Remove tensors of results that were there for so long, whether anybody has fetched them or not; how many. What is
    needed to compute the log again stays."""
    with database.read() as session:
        query = (
            select(SessionOperation.session_id, SessionOperation.position, SessionOperation.result_bytes)
            .where(SessionOperation.result_bytes > 0, SessionOperation.done_at < db_now() - hours * 3600.0)
            .order_by(SessionOperation.done_at)
            .limit(most)
        )
        old = [(str(row[0]), int(row[1]), int(row[2])) for row in session.execute(query)]
    for session_id, position, _ in old:
        result_path(layout.session(session_id), position).unlink(missing_ok=True)
    sizes: Counter[str] = Counter()
    with database.write() as session:
        for session_id, position, size in old:
            sizes[session_id] += size
            session.execute(
                update(SessionOperation)
                .where(SessionOperation.session_id == session_id, SessionOperation.position == position)
                .values(result_bytes=0)
                .execution_options(synchronize_session=False)
            )
        for session_id, size in sizes.items():
            session.execute(
                update(SessionRow)
                .where(SessionRow.id == session_id)
                .values(log_bytes=SessionRow.log_bytes - size)
                .execution_options(synchronize_session=False)
            )
    return len(old)


def waits(session: Session, session_id: str) -> bool:
    """Whether an operation has not been computed."""
    query = select(SessionOperation.position).where(
        SessionOperation.session_id == session_id, SessionOperation.done_at.is_(None)
    )
    return session.execute(query.limit(1)).one_or_none() is not None
