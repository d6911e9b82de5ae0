"""`/users` and `/projects`: who there is, and who is what in which project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import people, schemas
from api.auth.policy import ManagingOrOperating, Operating, Principal, ReadingOrOperating, Role
from api.deps import Here, Installation
from api.errors import responses
from api.http.body import json_body, read_json
from api.http.once import Asked, answer
from core.db.tables import Project, User
from core.errors import NotFound
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
def list_users(asking: Operating, here: Here) -> Response:
    """Everybody who has ever had a key on this box."""
    with here.database.read() as session:
        users = session.execute(select(User).order_by(User.name)).scalars().all()
        return JSONResponse({"data": [schemas.user_view(user) for user in users]})


@router.post(
    "/users",
    status_code=201,
    summary="Add a user",
    response_model=schemas.UserView,
    response_class=JSONResponse,
    responses=responses(409, 413, 415, 422),
    openapi_extra=json_body(schemas.NewUser, {"name": "ada"}),
)
async def create_user(request: Request, asking: Operating, here: Here, once: Asked) -> Response:
    """Somebody without a project yet: make them a member of one, then a key for it."""
    wish = await read_json(request, schemas.NewUser, here.settings.max_body_bytes)

    def make(session: Session) -> dict[str, Any]:
        return schemas.user_view(people.add_user(session, asking, wish.name, box_admin=wish.box_admin))

    return await run_in_threadpool(answer, here, asking, once, wish.model_dump(mode="json"), make, status=201)


@router.get(
    "/users/{user}",
    summary="Show a user",
    response_model=schemas.UserView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def show_user(user: UserName, asking: Operating, here: Here) -> Response:
    """Name, whether they look after the box, and whether they are disabled."""
    with here.database.read() as session:
        return JSONResponse(schemas.user_view(people.user(session, user)))


@router.patch(
    "/users/{user}",
    summary="Change a user",
    response_model=schemas.UserView,
    response_class=JSONResponse,
    responses=responses(404, 409, 413, 415, 422),
    openapi_extra=json_body(schemas.UserChange, {"disabled": True}),
)
async def change_user(request: Request, user: UserName, asking: Operating, here: Here) -> Response:
    """Make somebody an admin of the box or take that away; disable somebody, which stops all their keys at once."""
    wish = await read_json(request, schemas.UserChange, here.settings.max_body_bytes)

    def change(session: Session) -> dict[str, Any]:
        found = people.user(session, user)
        people.change_user(session, asking, found, box_admin=wish.box_admin, disabled=wish.disabled)
        return schemas.user_view(found)

    return await _written(here, change)


# -- projects


@router.get(
    "/projects",
    summary="List projects",
    response_model=schemas.ProjectList,
    response_class=JSONResponse,
    responses=responses(),
)
def list_projects(asking: ReadingOrOperating, here: Here) -> Response:
    """The project of your key; for admins of the box, all of them."""
    query = select(Project).order_by(Project.name)
    if not asking.operates:
        query = query.where(Project.id == asking.project_id)
    with here.database.read() as session:
        projects = session.execute(query).scalars().all()
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
async def create_project(request: Request, asking: Operating, here: Here, once: Asked) -> Response:
    """With its first admin, who says who else belongs to it."""
    wish = await read_json(request, schemas.NewProject, here.settings.max_body_bytes)

    def make(session: Session) -> dict[str, Any]:
        admin = people.user(session, wish.admin or asking.user_id, field="admin")
        made = people.add_project(session, asking, wish.name)
        people.set_member(session, asking, made.id, admin, Role.ADMIN)
        return schemas.project_view(made, False)

    return await run_in_threadpool(answer, here, asking, once, wish.model_dump(mode="json"), make, status=201)


@router.get(
    "/projects/{project}",
    summary="Show a project",
    response_model=schemas.ProjectView,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def show_project(project: ProjectName, asking: ReadingOrOperating, here: Here) -> Response:
    """Its id, its name, since when there is one, and what its admins have decided."""
    with here.database.read() as session:
        found = _project(session, asking, project)
        return JSONResponse(schemas.project_view(found, bool(quotas.preemptible(session, [found.id]))))


@router.patch(
    "/projects/{project}",
    summary="Change a project",
    response_model=schemas.ProjectView,
    response_class=JSONResponse,
    responses=responses(404, 413, 415, 422),
    openapi_extra=json_body(schemas.ProjectChange, {"preemptible": False}),
)
async def change_project(request: Request, project: ProjectName, asking: ManagingOrOperating, here: Here) -> Response:
    """Whether its running jobs make room for higher priorities. What was asked to leave already does."""
    wish = await read_json(request, schemas.ProjectChange, here.settings.max_body_bytes)

    def change(session: Session) -> dict[str, Any]:
        where = _project(session, asking, project)
        quotas.set_preemptible(session, asking, where.id, wish.preemptible)
        return schemas.project_view(where, wish.preemptible)

    return await _written(here, change)


@router.get(
    "/projects/{project}/members",
    summary="List members",
    response_model=schemas.MemberList,
    response_class=JSONResponse,
    responses=responses(404, 422),
)
def list_members(project: ProjectName, asking: ReadingOrOperating, here: Here) -> Response:
    """Who belongs to the project, in which role, since when."""
    with here.database.read() as session:
        rows = people.members(session, _project(session, asking, project).id)
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
    request: Request, project: ProjectName, user: UserName, asking: ManagingOrOperating, here: Here
) -> Response:
    """It holds from their next request on. A project keeps at least one admin."""
    wish = await read_json(request, schemas.NewRole, here.settings.max_body_bytes)

    def change(session: Session) -> dict[str, Any]:
        where = _project(session, asking, project)
        member = people.user(session, user)
        return schemas.member_view(people.set_member(session, asking, where.id, member, wish.role), member)

    return await _written(here, change)


@router.delete(
    "/projects/{project}/members/{user}",
    summary="Remove a member",
    response_model=schemas.MemberRemoved,
    response_class=JSONResponse,
    responses=responses(404, 409, 422),
)
def remove_member(project: ProjectName, user: UserName, asking: ManagingOrOperating, here: Here) -> Response:
    """Their keys for this project are revoked with it; their jobs and files stay the project's."""
    with here.database.write() as session:
        where = _project(session, asking, project)
        member = people.user(session, user)
        people.remove_member(session, asking, where.id, member)
        return JSONResponse({"user": member.id, "removed": True})


def _project(session: Session, asking: Principal, id_or_name: str) -> Project:
    """Raises NotFound for another project than the key's, as for none, to all but admins of the box."""
    if id_or_name in (asking.project_id, asking.project_name):
        return session.get_one(Project, asking.project_id)
    if not asking.operates:
        raise NotFound(people.no_project(id_or_name), field="project")
    return people.project(session, id_or_name)


async def _written(here: Installation, work: Callable[[Session], dict[str, Any]]) -> Response:
    def run() -> Response:
        with here.database.write() as session:
            return JSONResponse(work(session))

    return await run_in_threadpool(run)
