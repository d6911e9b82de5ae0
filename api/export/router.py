"""`GET /projects/{project}/export`: all that a project owns, as one archive."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import Response, StreamingResponse

from api.auth import people
from api.auth.people_router import ProjectName
from api.auth.policy import Managing
from api.deps import App
from api.export.contents import Exporter
from api.http.errors import responses
from api.http.ranges import disposition
from core.errors import NotFound
from core.jobs.policies import audit

router = APIRouter(tags=["access"])


@router.get(
    "/projects/{project}/export",
    summary="Export a project",
    response_class=Response,
    responses={
        200: {
            "description": "A tar archive, sent as it is made; docs/operations.md says what is in it.",
            "content": {
                "application/x-tar": {"schema": {"type": "string", "format": "binary"}, "example": "eft-proj-…"}
            },
        },
        **responses(404, 422),
    },
)
def export_project(
    project: ProjectName,
    principal: Managing,
    app: App,
    checkpoints: Annotated[bool, Query(description="With the checkpoints of its jobs, too.")] = False,
) -> Response:
    """All data of your key's project, for its admins: jobs with specs, events, metrics, logs and models, files,
    members, audit and usage, without secrets. If `MANIFEST.jsonl` does not end with `complete`, the archive is
    incomplete: request it again."""
    if project not in (principal.project_id, principal.project_name):
        raise NotFound(people.no_project(project), field="project")
    with app.database.write() as session:
        audit.record(session, principal, "project.export", principal.project_id, {"checkpoints": checkpoints})
    exporter = Exporter(app.database, app.layout, app.store, principal.project_id, checkpoints)
    headers = {"content-disposition": disposition(f"{principal.project_name}.tar"), "cache-control": "no-store"}
    return StreamingResponse(exporter.stream(), media_type="application/x-tar", headers=headers)
