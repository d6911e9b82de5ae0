"""Copies of saved weights: each belongs to a session of its own, which was never computed."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from core.base.files import sync
from core.db.engine import db_now
from core.db.tables import SessionOperation, SessionSave
from core.errors import Conflict
from core.jobs.base.transitions import Actor
from core.jobs.lifecycle import submit
from core.jobs.lifecycle.sessions import log, records, saves
from core.jobs.lifecycle.sessions.records import FoundSession
from core.jobs.policies.volume import VolumeLimits
from core.spec.job import JobSpec
from core.spec.session.job import SessionSpec
from core.storage.layout import Layout

told = logging.getLogger("eft.sessions.copies")
POSITION = 1
_WHY = "it holds a copy of saved weights: there is nothing to compute"


def write(
    session: Session,
    actor: Actor,
    layout: Layout,
    spec: SessionSpec,
    job: JobSpec,
    source: SessionSave,
    *,
    model: str,
    ttl_seconds: float | None,
    bounds: VolumeLimits,
) -> tuple[FoundSession, SessionSave]:
    """Copy saved weights into a session of the actor's project, which is closed. Asked again for a session of the same
    name it is the same copy. Raises Conflict where the name is another session's."""
    assert spec.name is not None
    known = records.named(session, actor, spec.name)
    if known is not None:
        row = saves.in_folder(session, known.row.id, source.folder)
        if row is None or row.position != POSITION or known.row.positions != POSITION:
            raise Conflict("this number is another model's", field="model_seq_id", code="session_name_taken")
        return known, row
    made = records.create(session, actor, spec, job, bounds=bounds)
    submit.stop(session, actor, made.job, why=_WHY)
    folder = layout.saved(made.row.id, source.folder)
    operation: dict[str, Any] = {"op": "load", "model": model, "folder": str(folder), "with_optimizer": True}
    made.row.positions = POSITION
    session.add(
        SessionOperation(
            session_id=made.row.id,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            position=POSITION,
            model=model,
            seq=0,
            operation=operation,
            sha256=log.digest(operation, b""),
            done_at=db_now(),
            result={},
        )
    )
    session.flush()
    saves.note(
        session,
        actor,
        made.row.id,
        POSITION,
        folder=source.folder,
        kind=source.kind,
        label=source.label,
        about=source.about,
        ttl_seconds=ttl_seconds,
    )
    session.flush()
    _link(layout.saved(source.session_id, source.folder), folder)
    row = session.get_one(SessionSave, (made.row.id, POSITION))
    return made, row


def _link(source: Path, folder: Path) -> None:
    """Saved files never change, so that both folders may have the same ones."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, folder, copy_function=os.link)
    except (OSError, shutil.Error) as error:
        told.warning("%s is copied byte by byte, for its files cannot be linked: %s", source, error)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    sync(folder)
    sync(folder.parent)
