"""`/` and `/ui`: the dashboard's pages, its files, and its stream of changes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import RedirectResponse, Response

from api.auth.policy import PUBLIC, ReadingOrOperating
from api.deps import App, authorise, public
from api.errors import printable
from api.events.router import EventStream, while_allowed
from api.web import render, signin_router
from api.web.changes import Changes
from api.web.pages import (
    box_router,
    compare_router,
    files_router,
    jobs_router,
    models_router,
    new_router,
    people_router,
    rollouts_router,
    try_router,
)
from core.errors import NotFound

_open = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[PUBLIC, Depends(public)])
_closed = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
FOR_EVER = "public, max-age=31536000, immutable"


@_open.get("/")
async def home() -> Response:
    return RedirectResponse("ui/jobs", 303)


@_open.get("/ui")
async def ui() -> Response:
    return RedirectResponse("ui/jobs", 303)


@_open.get("/ui/")
async def ui_slash() -> Response:
    return RedirectResponse("jobs", 303)


@_open.get("/ui/static/{name:path}")
async def static(name: str, v: Annotated[str, Query(max_length=64)] = "") -> Response:
    """A script or a style. Its hash is in the address, so that a browser keeps it for ever."""
    found = render.static_file(name)
    if found is None:
        raise NotFound("there is no such file")
    data, digest = found
    kept = FOR_EVER if v == digest else "no-cache"
    media_type = render.TYPES[name[name.rindex(".") :]]
    return Response(data, media_type=media_type, headers={"cache-control": kept, "etag": f'"{digest}"'})


@_closed.get("/ui/changes")
async def changes(
    request: Request,
    app: App,
    principal: ReadingOrOperating,
    after: Annotated[str, Query(max_length=64, pattern=r"^[0-9a-f]*$")] = "",
    last_event_id: Annotated[str, Header()] = "",
) -> Response:
    """The one stream of an open page (api/web/changes.py)."""
    told: Changes = request.app.state.changes
    return EventStream(while_allowed(app, principal, told.follow(principal.project_id, last_event_id or after)))


_last = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])


@_last.get("/ui/{path:path}")
async def no_page(principal: ReadingOrOperating, path: str) -> Response:
    """Asked after all others: an address of the dashboard without a page."""
    raise NotFound(f"there is no page `{printable(path)}`")


ROUTERS = (
    _open,
    signin_router.open_router,
    _closed,
    signin_router.closed_router,
    jobs_router.router,
    rollouts_router.router,
    compare_router.router,
    new_router.router,
    box_router.router,
    files_router.router,
    people_router.router,
    models_router.router,
    try_router.router,
    _last,
)
"""All of the dashboard. None is in the OpenAPI document, and each states the policy of its pages."""
