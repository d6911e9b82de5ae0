"""What sessions have saved under names of their callers': found, listed, and removed when its time has come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from core.db.engine import Database, db_now, read_now
from core.db.tables import Job, SessionOperation, SessionRow, SessionSave
from core.errors import Conflict, NotFound
from core.jobs.base.states import FINAL
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle.sessions.records import FoundSession, find
from core.jobs.policies import audit
from core.removal import remove
from core.storage.layout import Layout

ASIDE = ".gone-"
SWEEP = 200
"""Rows that are looked at in one sweep."""


@dataclass(frozen=True, slots=True)
class Saved:
    row: SessionSave
    done_at: float


def check_label(session: Session, session_id: str, kind: str, label: str, seq: int) -> None:
    """Raises Conflict where another operation has saved under this name, or is about to."""
    query = (
        select(SessionOperation.seq)
        .join(SessionSave, _of(SessionSave))
        .where(
            SessionSave.session_id == session_id,
            SessionSave.kind == kind,
            SessionSave.label == label,
            SessionOperation.seq != seq,
            SessionOperation.error.is_(None),
            _lives(SessionSave),
        )
    )
    if session.execute(query.limit(1)).one_or_none() is not None:
        words = f"`{label}` has been saved already: set `overwrite`, or take another name"
        raise Conflict(words, field="path", code="session_name_taken")


def note(
    session: Session,
    actor: Actor,
    session_id: str,
    position: int,
    *,
    folder: str,
    kind: str,
    label: str,
    about: dict[str, Any],
    ttl_seconds: float | None,
    recipients: list[str] | None = None,
) -> None:
    """Write the row of an operation that was accepted. The same operation again changes nothing."""
    found = find(session, actor, session_id)
    if session.get(SessionSave, (session_id, position)) is not None:
        return
    row = SessionSave(
        session_id=session_id,
        position=position,
        folder=folder,
        kind=kind,
        label=label,
        about=about,
        expires_at=None if ttl_seconds is None else read_now(session) + ttl_seconds,
        recipients=recipients,
        owner_id=found.row.owner_id,
        project_id=found.row.project_id,
    )
    session.add(row)


def newest(session: Session, session_id: str, kind: str, label: str) -> SessionSave | None:
    """What is saved under a name now."""
    query = _saved().where(SessionSave.session_id == session_id, SessionSave.kind == kind, SessionSave.label == label)
    found = session.execute(query.order_by(SessionSave.position.desc()).limit(1)).one_or_none()
    return None if found is None else found[0]


def published(session: Session, name: str, kind: str, label: str) -> tuple[FoundSession, SessionSave] | None:
    """What a session of this name, of whatever project, has published. The oldest session of a name has it, so that
    nobody can put another in its place."""
    named = select(SessionRow, Job).join(Job, Job.id == SessionRow.id).where(Job.name == name)
    found = session.execute(named.order_by(SessionRow.id).limit(1)).one_or_none()
    row = None if found is None else newest(session, found[0].id, kind, label)
    return None if found is None or row is None or row.published_at is None else (FoundSession(*found), row)


def readable(session: Session, actor: Actor, session_id: str, folder: str | None) -> FoundSession:
    """The session that has saved this folder, where it is one of the actor's project or the folder is published. Raises
    NotFound."""
    try:
        return find(session, actor, session_id)
    except NotFound:
        row = None if folder is None else in_folder(session, session_id, folder)
        if row is None or row.published_at is None or not _is_there(session, row):
            raise
        return FoundSession(session.get_one(SessionRow, session_id), session.get_one(Job, session_id))


def publish(session: Session, actor: Actor, row: SessionSave, wanted: bool) -> None:
    """Let all projects of the installation read what is saved under a name now, or no others any more. Asking twice is
    fine."""
    if (row.published_at is not None) is wanted:
        return
    session.execute(
        update(SessionSave)
        .where(SessionSave.session_id == row.session_id, SessionSave.position == row.position)
        .values(published_at=db_now() if wanted else None)
        .execution_options(synchronize_session=False)
    )
    what = "session.publish" if wanted else "session.unpublish"
    audit.record(session, actor, what, row.session_id, {"kind": row.kind, "label": row.label})


def in_folder(session: Session, session_id: str, folder: str) -> SessionSave | None:
    """The row of a folder, also of one that has gone."""
    query = select(SessionSave).where(SessionSave.session_id == session_id, SessionSave.folder == folder)
    return session.execute(query).scalar_one_or_none()


def page(
    session: Session, actor: Actor, session_id: str | None = None, *, offset: int = 0, limit: int = 100
) -> tuple[list[Saved], int]:
    """What a session of the actor's project has saved, or all of them, newest first; and the number of all."""
    query = _saved().where(SessionSave.project_id == actor.project_id, ~_replaced())
    if session_id is not None:
        query = query.where(SessionSave.session_id == session_id)
    count = session.execute(select(func.count()).select_from(query.subquery())).scalar_one()
    ordered = query.order_by(SessionOperation.done_at.desc(), SessionSave.session_id, SessionSave.position)
    return [Saved(*row) for row in session.execute(ordered.offset(offset).limit(limit))], count


def expire(session: Session, actor: Actor, row: SessionSave, ttl_seconds: float | None) -> None:
    """Let it be gone so many seconds from now: 0 at once; None: never. What stood under its name before goes too."""
    session.execute(
        update(SessionSave)
        .where(
            SessionSave.project_id == actor.project_id,
            SessionSave.session_id == row.session_id,
            SessionSave.kind == row.kind,
            SessionSave.label == row.label,
            SessionSave.position <= row.position,
        )
        .values(expires_at=None if ttl_seconds is None else read_now(session) + ttl_seconds)
        .execution_options(synchronize_session=False)
    )


def sweep(database: Database, layout: Layout) -> int:
    """Remove the files of what has gone or was replaced, unless a session may have to compute with them again after a
    crash. The number of folders."""
    with database.read() as session:
        rows = [
            *session.execute(select(SessionSave).where(or_(~_lives(SessionSave), _replaced())).limit(SWEEP)).scalars()
        ]
    gone = 0
    for row in rows:
        folder = layout.saved(row.session_id, row.folder)
        with database.read() as session:
            if _needed(session, row, str(folder)):
                continue
        if folder.is_dir():
            remove(folder, ASIDE)
        with database.write() as session:
            session.delete(session.merge(row))
        gone += 1
    return gone


def _needed(session: Session, row: SessionSave, folder: str) -> bool:
    """Whether an operation behind the last snapshot of its session made the folder, or reads it."""
    mine = (SessionOperation.session_id == row.session_id) & (SessionOperation.position == row.position)
    reads = SessionOperation.operation["folder"].as_string() == folder
    query = (
        select(SessionOperation.position)
        .join(SessionRow, SessionRow.id == SessionOperation.session_id)
        .join(Job, Job.id == SessionRow.id)
        .where(
            SessionOperation.position > SessionRow.snapshot,
            Job.status.not_in([status.value for status in FINAL]),
            or_(mine, reads),
        )
    )
    return session.execute(query.limit(1)).first() is not None


def _is_there(session: Session, row: SessionSave) -> bool:
    mine = _saved().where(SessionSave.session_id == row.session_id, SessionSave.position == row.position)
    return session.execute(mine).first() is not None


def _saved() -> Any:
    """Rows whose files are there, with the time at which these were."""
    query = select(SessionSave, SessionOperation.done_at).join(SessionOperation, _of(SessionSave))
    return query.where(SessionOperation.done_at.is_not(None), SessionOperation.error.is_(None), _lives(SessionSave))


def _of(row: Any) -> ColumnElement[bool]:
    found: ColumnElement[bool] = (SessionOperation.session_id == row.session_id) & (
        SessionOperation.position == row.position
    )
    return found


def _lives(row: Any) -> ColumnElement[bool]:
    return or_(row.expires_at.is_(None), row.expires_at > db_now())


def _replaced() -> ColumnElement[bool]:
    """Whether a newer one has the name and is there."""
    newer, done = aliased(SessionSave), aliased(SessionOperation)
    return exists().where(
        newer.session_id == SessionSave.session_id,
        newer.kind == SessionSave.kind,
        newer.label == SessionSave.label,
        newer.position > SessionSave.position,
        done.session_id == newer.session_id,
        done.position == newer.position,
        done.done_at.is_not(None),
        done.error.is_(None),
    )
