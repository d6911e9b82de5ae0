"""What routes ask for: the running installation, who is asking, and well-formed parameters.

Those that ask no database are coroutines: a plain function would cost a request one more trip to the thread pool each.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from api.auth import families, service
from api.auth.last_use import LastUse
from api.auth.permit import forbidden, lacks
from api.auth.policy import Principal, policy_of
from api.context import request_id
from api.errors import BadRequest, nearest, printable
from api.events.hub import Hub
from api.files.checking import Checkers
from api.http.body_limits import RequestLimits
from api.metrics.latencies import Latencies
from api.notices.lookups import Lookups
from api.sessions.wakes import Wakes
from api.web import sessions
from core.db.engine import Database
from core.errors import Unauthorized
from core.settings import Settings
from core.storage.layout import Layout
from core.storage.store import Store

log = logging.getLogger("eft.api.auth")

UPLOADS_AT_ONCE = 4
"""Uploads of one API process whose bytes are being checked and written; others wait, however many there are."""


@dataclass(frozen=True, slots=True)
class AppState:
    """What one API process holds for its whole life."""

    settings: Settings
    database: Database
    layout: Layout
    store: Store
    """The data root; `layout` is what this process works on."""
    hub: Hub
    limits: RequestLimits
    last_use: LastUse
    wakes: Wakes
    checkers: Checkers = field(default_factory=Checkers)
    upload_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(UPLOADS_AT_ONCE, "upload"))
    """Not those that all other routes share."""
    lookups: Lookups = field(default_factory=Lookups)
    latencies: Latencies = field(default_factory=Latencies)


async def app_state(request: Request) -> AppState:
    state: AppState = request.app.state.eft
    return state


App = Annotated[AppState, Depends(app_state)]


async def only_known_parameters(request: Request) -> None:
    """Raises BadRequest for a misspelt query parameter: `?dryrun=true` must not make a job; and for NUL in a value."""
    route: APIRoute = request.scope["route"]
    if not request.query_params or not route.include_in_schema:  # HEAD and Tinker's: their callers are not ours
        return
    for name, value in request.query_params.multi_items():
        if "\0" in value:
            raise BadRequest(f"`{printable(name)}` holds U+0000, which no text here may", field=printable(name))
    known = query_parameters(route)
    for name in request.query_params:
        if name not in known:
            words = nearest(name, known) if known else "this route has none"
            raise BadRequest(
                f"unknown query parameter `{printable(name)}`; {words}", field=printable(name), code="unknown_parameter"
            )


def query_parameters(route: APIRoute) -> list[str]:
    """The names of the query parameters that the document has of a route. Not taken from the document: making that
    takes longer than all else that the first request waits for."""
    names: dict[str, None] = {}
    for param in get_flat_params(route.dependant):
        if isinstance(info := param.field_info, params.Query) and info.include_in_schema:
            names[param.alias] = None
    return list(names)


def address_of(request: Request) -> str:
    """Address of the client; behind a trusted proxy, the address that the proxy reports (`api/server.py`)."""
    return request.client.host if request.client is not None else "local"


async def public(request: Request, app: App) -> None:
    """For routes that ask for no key. Raises RateLimited."""
    app.limits.public(address_of(request))


_bearer = HTTPBearer(auto_error=False, description="An API key: `eft_…`, shown once when it is made.")


def _tinker_key(request: Request) -> str | None:
    """The key as Tinker's SDK sends it: `tml-` before an API key of eft, or the key alone."""
    within = request.scope["path"].startswith("/api/v1/")
    return request.headers.get("x-api-key", "").removeprefix("tml-") or None if within else None


def authorise(
    request: Request, app: App, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> None:
    """Hold the request to its route's policy, before anything else of it is looked at.

    Raises Unauthorized, in the same words for an unknown, a revoked, a mistyped key; Forbidden, which says nothing of
    what was asked for, since nothing was looked up; and RateLimited.
    """
    policy = policy_of(request.scope["route"])
    if policy.scope is None:
        request.state.principal = None
        return
    address = address_of(request)
    key = given.credentials if given is not None else _tinker_key(request)
    cookie = None if key is not None else request.cookies.get(sessions.COOKIE)
    credentials = cookie if key is None else key
    app.limits.before(credentials, address)
    if credentials is None:
        app.limits.stranger(None, address)
        raise Unauthorized("send your API key in the header `Authorization: Bearer eft_…`", code="missing_api_key")
    principal = identify(app, credentials, address, session=cookie is not None)
    app.limits.known(credentials, principal.user_id)
    if cookie is not None and request.method not in ("GET", "HEAD"):
        sessions.check_token(cookie, request.headers.get(sessions.TOKEN_HEADER))
    app.last_use.note(principal)
    request.state.principal = principal
    if (missing := lacks(principal, policy)) is not None:
        with app.database.read() as session:
            raise forbidden(session, principal, missing)


def identify(app: AppState, credentials: str, address: str, *, session: bool = False) -> Principal:
    """The user behind an API key, or behind the `session` of a browser: neither passes for the other.

    Raises Unauthorized, and remembers that this address came with a wrong key.
    """
    try:
        with app.database.read() as reading:
            found = service.authenticate(reading, credentials, request_id.get())
    except Unauthorized as error:  # it has expired
        app.limits.stranger(credentials, address)
        if isinstance(error, families.Reused):
            with app.database.write() as writing:
                ended = families.end_reused(writing, error.key_id)
            log.warning("key %s came after its end: its family is revoked, %d keys worked", error.key_id, len(ended))
        raise
    if found is None or found.session is not session:
        app.limits.stranger(credentials, address)
        raise Unauthorized("this API key is not known here or has been revoked")
    return found


Limit = Annotated[int, Query(ge=1, le=200, description="Rows of a page.")]
After = Annotated[
    str | None, Query(max_length=64, pattern=r"^[a-z0-9-]+$", description="Id of the last row of the page before.")
]
