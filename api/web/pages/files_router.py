"""The pages of files."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.auth.policy import Reading
from api.deps import After, authorise
from api.files.router import list_files, show_file
from api.handles import FileId
from api.web import render
from api.web.views import Views

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
ROWS = 100


@router.get("/ui/files")
def files_page(request: Request, principal: Reading, after: After = None) -> Response:
    """The project's files, and the upload."""
    found = Views(request, principal).ask(list_files, sha256=None, limit=ROWS, after=after)
    return render.page(request, "files.html", files=found["data"], more=found["next"], first_page=after is None)


@router.get("/ui/files/{file_id}")
def file_page(request: Request, file_id: FileId, principal: Reading) -> Response:
    """One file: what its check found, and its first rows."""
    return render.page(request, "file.html", file=Views(request, principal).ask(show_file, file_id=file_id))
