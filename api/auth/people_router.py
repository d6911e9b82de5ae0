"""`/users` and `/projects`: who there is, and who is what in which project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy.orm import Session

from api.auth import people, schemas
from api.auth.policy import ManagingOrOperating, Operating, ReadingOrOperating, Role
from api.deps import App, AppState
from api.http.body import json_body, read_json
from api.http.errors import responses
from api.http.once import Asked, answer
from core.jobs.policies import quotas

router = APIRouter(tags=["access"])

UserName = Annotated[
    str, Path(max_length=100, pattern=r"^[^\x00]+$", description="Id or name of a user.", examples=["ada"])
]
ProjectName = Annotated[
    str, Path(max_length=100, pattern=r"^[^\x00]+$", description="Id or name of a project.", examples=["voice"])
]

# -- users


@router.get(
    "/users", summary="List users", response_model=schemas.UserList, response_class=JSONResponse, responses=responses()
)
def list_users(principal: Operating, app: App) -> Response:
    """All users of this box."""
    with app.database.read() as session:
        return JSONResponse({"data": [schemas.user_view(user) for user in people.users(session)]})


@router.post(
    "/users",
    status_code=201,
    summary="Add a user",
    response_model=schemas.UserView,
    response_class=JSONResponse,
    responses=responses(409, 413, 415, 422),
    openapi_extra=json_body(schemas.NewUser, {"name": "ada"}),
)
async def create_user(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """Add a user without a project; then add them to a project and create a key for it."""
    wish = await read_json(request, schemas.NewUser, app.settings.max_body_bytes)

    def make(session: Session) -> dict[str, Any]:
        return schemas.user_view(people.add_user(session, principal, wish.name, box_admin=wish.box_admin))

    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(mode="json"), make, status=201)


@router.get(
    "/users/{user}",
    summary="Show a user",
    response_model=schemas.UserView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def show_user(user: UserName, principal: Operating, app: App) -> Response:
    """Name, whether the user is an admin of the box, and whether the user is disabled."""
    with app.database.read() as session:
        return JSONResponse(schemas.user_view(people.user(session, user)))


@router.patch(
    "/users/{user}",
    summary="Change a user",
    response_model=schemas.UserView,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.UserChange, {"disabled": True}),
)
async def change_user(request: Request, user: UserName, principal: Operating, app: App) -> Response:
    """Grant or remove the right of an admin of the box; disable or enable a user, with all keys."""
    wish = await read_json(request, schemas.UserChange, app.settings.max_body_bytes)

    def change(session: Session) -> dict[str, Any]:
        found = people.user(session, user)
        people.change_user(session, principal, found, box_admin=wish.box_admin, disabled=wish.disabled)
        return schemas.user_view(found)

    return await _written(app, change)


# -- projects


@router.get(
    "/projects",
    summary="List projects",
    response_model=schemas.ProjectList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_projects(principal: ReadingOrOperating, app: App) -> Response:
    """The project of your key, or all for admins of the box."""
    with app.database.read() as session:
        projects = people.projects(session, None if principal.operates else principal.project_id)
        allowed = quotas.preemptible(session, [project.id for project in projects])
        return JSONResponse({"data": [schemas.project_view(one, one.id in allowed) for one in projects]})


@router.post(
    "/projects",
    status_code=201,
    summary="Add a project",
    response_model=schemas.ProjectView,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.NewProject, {"name": "voice", "admin": "ada"}),
)
async def create_project(request: Request, principal: Operating, app: App, once: Asked) -> Response:
    """Add a project with its first admin, who manages the members."""
    wish = await read_json(request, schemas.NewProject, app.settings.max_body_bytes)

    def make(session: Session) -> dict[str, Any]:
        admin = people.user(session, wish.admin or principal.user_id, field="admin")
        made = people.add_project(session, principal, wish.name)
        people.set_member(session, principal, made.id, admin, Role.ADMIN)
        return schemas.project_view(made, False)

    return await run_in_threadpool(answer, app, principal, once, wish.model_dump(mode="json"), make, status=201)


@router.get(
    "/projects/{project}",
    summary="Show a project",
    response_model=schemas.ProjectView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def show_project(project: ProjectName, principal: ReadingOrOperating, app: App) -> Response:
    """Id, name, time of creation and options."""
    with app.database.read() as session:
        found = people.reachable_project(session, principal, project)
        return JSONResponse(schemas.project_view(found, bool(quotas.preemptible(session, [found.id]))))


@router.patch(
    "/projects/{project}",
    summary="Change a project",
    response_model=schemas.ProjectView,
    response_class=JSONResponse,
    responses=responses(404, 413, 415, 422),
    openapi_extra=json_body(schemas.ProjectChange, {"preemptible": False}),
)
async def change_project(request: Request, project: ProjectName, principal: ManagingOrOperating, app: App) -> Response:
    """Set whether its running jobs can be preempted. Preemptions in progress continue."""
    wish = await read_json(request, schemas.ProjectChange, app.settings.max_body_bytes)

    def change(session: Session) -> dict[str, Any]:
        where = people.reachable_project(session, principal, project)
        quotas.set_preemptible(session, principal, where.id, wish.preemptible)
        return schemas.project_view(where, wish.preemptible)

    return await _written(app, change)


@router.get(
    "/projects/{project}/members",
    summary="List members",
    response_model=schemas.MemberList,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def list_members(project: ProjectName, principal: ReadingOrOperating, app: App) -> Response:
    """Lists the members of a project, each with a role and the time of joining."""
    with app.database.read() as session:
        rows = people.members(session, people.reachable_project(session, principal, project).id)
        return JSONResponse({"data": [schemas.member_view(membership, user) for membership, user in rows]})


@router.put(
    "/projects/{project}/members/{user}",
    summary="Add a member, or change their role",
    response_model=schemas.MemberView,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.NewRole, {"role": "member"}),
)
async def set_member(
    request: Request, project: ProjectName, user: UserName, principal: ManagingOrOperating, app: App
) -> Response:
    """The role applies from the next request on. A project keeps at least one admin."""
    wish = await read_json(request, schemas.NewRole, app.settings.max_body_bytes)

    def change(session: Session) -> dict[str, Any]:
        where = people.reachable_project(session, principal, project)
        member = people.user(session, user)
        return schemas.member_view(people.set_member(session, principal, where.id, member, wish.role), member)

    return await _written(app, change)


@router.delete(
    "/projects/{project}/members/{user}",
    summary="Remove a member",
    response_model=schemas.MemberRemoved,
    response_class=JSONResponse,
    responses=responses(404, 409, 422),
)
def remove_member(project: ProjectName, user: UserName, principal: ManagingOrOperating, app: App) -> Response:
    """Remove a member and revoke their keys for this project; their jobs and files stay."""
    with app.database.write() as session:
        where = people.reachable_project(session, principal, project)
        member = people.user(session, user)
        people.remove_member(session, principal, where.id, member)
        return JSONResponse({"user": member.id, "removed": True})


async def _written(app: AppState, work: Callable[[Session], dict[str, Any]]) -> Response:
    def run() -> Response:
        with app.database.write() as session:
            return JSONResponse(work(session))

    return await run_in_threadpool(run)
