"""A file that a job has handed back as a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request
from sqlalchemy.orm import Session

from api.deps import AppState
from api.http.errors import responses
from api.http.ranges import FileReply
from core.errors import NotFound
from core.jobs.views import queries

DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}, "example": "…"}},
    },
    206: {"description": "The range asked for."},
    304: {"description": "The client's copy is the same (If-None-Match)."},
    **responses(404, 410, 416),
}


def artifact_reply(
    request: Request, app: AppState, session: Session, job_id: str, path: str, *, missing: NotFound
) -> FileReply:
    """The file at `path` below the artifacts of a job that the caller may read. Raises `missing` for what its list does
    not name, and as FileReply."""
    row = queries.find_artifact(session, job_id, path)
    if row is None:
        raise missing
    folder = app.layout.artifacts(job_id, row.attempt)
    file = folder / row.path
    if not file.resolve().is_relative_to(folder.resolve()):  # the list came from a child process
        raise missing
    return FileReply(
        request,
        app.store,
        str(file.relative_to(app.layout.root)),
        size=row.bytes,
        sha256=row.sha256,
        filename=Path(row.path).name,
        media_type="application/octet-stream",
    )
