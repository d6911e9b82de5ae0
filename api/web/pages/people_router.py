"""The page of people: keys, members, users, projects, quotas, usage and the audit, with the forms that change them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from api.auth.audit_router import read_audit
from api.auth.people_router import (
    change_user,
    create_project,
    create_user,
    list_members,
    list_projects,
    list_users,
    set_member,
)
from api.auth.policy import ReadingOrOperating, Role, Scope
from api.auth.router import create_key, list_keys
from api.deps import authorise
from api.queue.router import list_limits, report_usage, set_limits
from api.queue.schemas import NewLimit
from api.web import render
from api.web.views import Views

router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
CHANGES = 50
QUOTAS = [name for name in NewLimit.model_fields if name not in ("scope", "name", "preemptible")]
"""Fields of a limit that the form sets as numbers. `preemptible` has a switch at the project."""
FORMS: dict[str, Callable[..., Any]] = {
    "key": create_key,
    "member": set_member,
    "user": create_user,
    "change_user": change_user,
    "project": create_project,
    "limit": set_limits,
}


@router.get("/ui/people")
def people_page(request: Request, principal: ReadingOrOperating) -> Response:
    """Keys and sessions, members, usage, quotas; for admins also everybody's, users, projects and the audit."""
    views = Views(request, principal)
    looks_after = principal.manages or principal.operates
    audit = views.may(
        read_audit, actor=None, action=None, target=None, key=None, request_id=None, since=None, until=None,
        project=None, limit=CHANGES, after=None,
    )  # fmt: skip
    return render.page(
        request,
        "people.html",
        may={name: views.can(route) for name, route in FORMS.items()},
        scopes=[scope.value for scope in Scope if principal.scope.reaches(scope)],
        roles=[role.value for role in Role],
        quotas=QUOTAS,
        keys=views.ask(list_keys, all=looks_after, project=None, limit=200, after=None)["data"],
        looks_after=looks_after,
        members=views.ask(list_members, project=principal.project_id)["data"],
        users=(views.may(list_users) or {}).get("data"),
        projects=views.ask(list_projects)["data"],
        usage=views.ask(report_usage, request=request, since=None, until=None, format="json"),
        limits=views.ask(list_limits)["data"],
        audit=None if audit is None else audit["data"],
    )
