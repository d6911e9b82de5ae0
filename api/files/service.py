"""Files of a project: the row after the bytes when it is made, before the bytes when it goes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from api.files.schemas import file_view
from api.files.upload import StoredFile
from core.db.engine import Database
from core.db.tables import File
from core.errors import Conflict
from core.jobs.lifecycle import deletion
from core.jobs.lifecycle.submit import Actor
from core.jobs.policies import audit
from core.jobs.views import queries
from core.storage.store import Store


def record(session: Session, actor: Actor, stored: StoredFile, filename: str) -> dict[str, Any]:
    """The bytes lie at their place; from here on the project has the file."""
    session.add(
        File(
            id=stored.id,
            owner_id=actor.user_id,
            project_id=actor.project_id,
            filename=filename,
            bytes=stored.bytes,
            sha256=stored.sha256,
            rows=stored.report.rows,
            format=stored.format,
            report=stored.report.as_dict(),
        )
    )
    session.flush()
    told = {"filename": filename, "bytes": stored.bytes, "sha256": stored.sha256}
    audit.record(session, actor, "file.upload", stored.id, told)
    row = session.execute(
        select(File).where(File.id == stored.id).execution_options(populate_existing=True)
    ).scalar_one()
    return file_view(row)


def remove(database: Database, store: Store, actor: Actor, file_id: str) -> None:
    """Raises NotFound, or Conflict while a job that is not over needs the file."""
    with database.write() as session:
        found = queries.find_file(session, actor.project_id, file_id, lock="delete")
        users = deletion.jobs_using_file(session, actor.project_id, file_id)
        if users:
            raise Conflict(
                f"{', '.join(users)} still needs this file; wait for the end of the job or cancel it",
                code="file_in_use",
                field="file_id",
            )
        session.execute(delete(File).where(File.id == file_id))
        audit.record(session, actor, "file.delete", file_id, {"filename": found.filename, "sha256": found.sha256})
    store.delete(f"files/{file_id}")
