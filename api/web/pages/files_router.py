"""The pages of files and of people."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.auth.audit_router import read_audit
from api.auth.people_router import list_members, list_users
from api.auth.policy import Reading, ReadingOrOperating
from api.auth.router import list_keys
from api.deps import After, authorise
from api.files.router import list_files, show_file
from api.handles import FileId
from api.queue.router import list_limits, report_usage
from api.web import render
from api.web.views import Views

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
ROWS = 100
CHANGES = 50


@router.get("/ui/files")
def files_page(request: Request, principal: Reading, after: After = None) -> Response:
    """The project's files, and the upload."""
    found = Views(request, principal).ask(list_files, sha256=None, limit=ROWS, after=after)
    return render.page(request, "files.html", files=found["data"], more=found["next"], first_page=after is None)


@router.get("/ui/files/{file_id}")
def file_page(request: Request, file_id: FileId, principal: Reading) -> Response:
    """One file: what its check found, and its first rows."""
    return render.page(request, "file.html", file=Views(request, principal).ask(show_file, file_id=file_id))


@router.get("/ui/people")
def people_page(request: Request, principal: ReadingOrOperating) -> Response:
    """Keys and sessions, members, usage; for admins also everybody's, users and the audit."""
    views = Views(request, principal)
    looks_after = principal.manages or principal.operates
    audit = views.may(
        read_audit, actor=None, action=None, target=None, key=None, request_id=None, since=None, until=None,
        project=None, limit=CHANGES, after=None,
    )  # fmt: skip
    return render.page(
        request,
        "people.html",
        keys=views.ask(list_keys, all=looks_after, project=None, limit=200, after=None)["data"],
        looks_after=looks_after,
        members=views.ask(list_members, project=principal.project_id)["data"],
        users=(views.may(list_users) or {}).get("data"),
        usage=views.ask(report_usage, request=request, since=None, until=None, format="json"),
        limits=views.ask(list_limits)["data"],
        audit=None if audit is None else audit["data"],
    )
