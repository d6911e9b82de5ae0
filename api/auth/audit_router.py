"""`GET /audit`: who changed what."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from api.auth import people, schemas
from api.auth.policy import ManagingOrOperating
from api.deps import After, App, Limit
from api.fields import QueryMoment
from api.http.errors import responses
from core.errors import NotFound
from core.jobs.policies import audit

router = APIRouter(tags=["access"])

Word = Annotated[str | None, Query(max_length=255, pattern=r"^[^\x00]+$")]


@router.get(
    "/audit",
    summary="Read the audit",
    response_model=schemas.AuditPage,
    response_class=JSONResponse,
    responses=responses(400, 404, 422),
)
def read_audit(
    principal: ManagingOrOperating,
    app: App,
    actor: Annotated[Word, Query(description="Only what this user did: id or name.")] = None,
    action: Annotated[Word, Query(description="Only this action, or with a dot at its end a kind: `key.`.")] = None,
    target: Annotated[Word, Query(description="Only what was done to this: an id, a node's name.")] = None,
    key: Annotated[Word, Query(description="Only actions with this key (id).")] = None,
    request_id: Annotated[Word, Query(description="Only of this request.")] = None,
    since: Annotated[QueryMoment | None, Query(description="From then on; ISO 8601.")] = None,
    until: Annotated[QueryMoment | None, Query(description="Before then; ISO 8601.")] = None,
    project: Annotated[Word, Query(description="Of this project (id or name); for admins of the box.")] = None,
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """Every change, newest first, with user, key, request, action and target.

    Admins of a project see all of it. Admins of the box see what concerns the box and every project's members and
    keys, but not the jobs and files of projects that they do not look after themselves.
    """
    with app.database.read() as session:
        if project is not None and project not in (principal.project_id, principal.project_name):
            if not principal.operates:
                raise NotFound(people.no_project(project), field="project")
            project = people.project(session, project).id
        elif project is not None:
            project = principal.project_id
        found = audit.page(
            session,
            project_id=principal.project_id if principal.manages else None,
            box=principal.operates,
            only_project=project,
            actor=None if actor is None else people.user(session, actor, field="actor").id,
            action=action,
            target=target,
            key_id=key,
            request_id=request_id,
            since=_seconds(since),
            until=_seconds(until),
            after=after,
            limit=limit,
        )
    data = [schemas.audit_view(*row) for row in found.items]
    following = found.items[-1][0].id if found.has_more else None
    return JSONResponse({"data": data, "has_more": found.has_more, "next": following})


def _seconds(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()
