"""A file that a job has handed back as a reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import Request

from api.deps import AppState
from api.http.errors import responses
from api.http.ranges import FileReply
from core.db.tables import Artifact
from core.errors import NotFound

DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The file.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}, "example": "…"}},
    },
    206: {"description": "The range asked for."},
    304: {"description": "The client's copy is the same (If-None-Match)."},
    **responses(404, 410, 416),
}


def artifact_reply(request: Request, app: AppState, row: Artifact, *, missing: NotFound) -> FileReply:
    """The file that a job has listed. Raises `missing` where it lies outside of the job's folder, and as FileReply."""
    folder = app.layout.artifacts(row.job_id, row.attempt)
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
