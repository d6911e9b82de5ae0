"""Sign in with an API key, sign out."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse, Response

from api.auth.policy import PUBLIC, Knowing
from api.deps import App, address_of, authorise, identify, public
from api.errors import RateLimited
from api.http.body import read_body
from api.web import render, sessions
from core.errors import EftError, Forbidden

open_router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[PUBLIC, Depends(public)])
closed_router = APIRouter(include_in_schema=False, route_class=render.PageRoute, dependencies=[Depends(authorise)])
FORM_BYTES = 4096
WHY = {"ended": "You were signed out: the session ended, or its key was revoked.", "out": "You are signed out."}


@open_router.get("/ui/signin")
async def sign_in_page(
    request: Request,
    where: Annotated[str, Query(alias="next", max_length=2000)] = "",
    why: Annotated[str, Query(max_length=20)] = "",
) -> Response:
    return render.page(request, "signin.html", where=where, told=WHY.get(why, ""), fault="")


@open_router.post("/ui/signin")
async def sign_in(request: Request, app: App) -> Response:
    """Begin a session with the API key of the form, and set its cookie."""
    form = await _form(request)
    where = form.get("next", "")
    _from_here(request)

    def begin() -> tuple[str, float]:
        address = address_of(request)
        key = form.get("key", "").strip()
        app.limits.before(key or None, address)
        principal = identify(app, key, address)
        app.limits.known(key, principal.user_id)
        app.last_use.note(principal)
        with app.database.write() as session:
            return sessions.begin(session, principal, request.headers.get("user-agent", ""), app.settings)

    try:
        secret, _ = await run_in_threadpool(begin)
    except RateLimited:
        raise
    except EftError as error:
        return render.page(request, "signin.html", error.status, where=where, told="", fault=error.message)
    reply = RedirectResponse(f"{render.to_root(request.url.path)}ui/{_inside(where)}", 303, headers=render.HEADERS)
    path, secure = _cookie_scope(request, app.settings.public_url)
    reply.set_cookie(
        sessions.COOKIE,
        secret,
        max_age=round(app.settings.session_hours * 3600),
        path=path,
        secure=secure,
        httponly=True,
        samesite="lax",
    )
    return reply


@closed_router.post("/ui/signout")
async def sign_out(request: Request, app: App, principal: Knowing) -> Response:
    """End this session on the server, and forget its cookie."""

    def end() -> None:
        with app.database.write() as session:
            sessions.end(session, principal)

    if not principal.session:
        raise Forbidden("an API key is not signed out; revoke it: `eft keys revoke`")
    await run_in_threadpool(end)
    reply = Response(status_code=204, headers=render.HEADERS)
    path, secure = _cookie_scope(request, app.settings.public_url)
    reply.delete_cookie(sessions.COOKIE, path=path, secure=secure, httponly=True, samesite="lax")
    return reply


async def _form(request: Request) -> dict[str, str]:
    body = await read_body(request, FORM_BYTES)
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _from_here(request: Request) -> None:
    """Raises Forbidden for a form that another site sends: it would sign somebody in as somebody else."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        raise Forbidden("the sign-in of this page was sent by another site", code="missing_csrf_token")
    host = urlsplit(origin).netloc if origin not in (None, "null") else None
    if site is None and host is not None and host != request.headers.get("host"):
        raise Forbidden("the sign-in of this page was sent by another site", code="missing_csrf_token")


def _inside(where: str) -> str:
    """The page to go on with: only ever one of ours."""
    plain = where.isprintable() and ":" not in where.partition("?")[0] and "\\" not in where and ".." not in where
    return where if where and plain and not where.startswith("/") else "jobs"


def _cookie_scope(request: Request, public_url: str) -> tuple[str, bool]:
    """Path of the cookie, and whether it goes over TLS alone."""
    address = urlsplit(public_url)
    return address.path.rstrip("/") or "/", "https" in (address.scheme, request.url.scheme)
