"""From templates to replies: the page's shell, its headers, errors as pages, and how values are written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import yaml
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from fastapi.routing import APIRoute
from jinja2 import ChainableUndefined, Environment, FileSystemLoader

from api.auth.permit import lacks
from api.auth.policy import Policy, Principal, Role, Scope
from api.context import request_id
from api.errors import BadRequest, RateLimited
from api.web import sessions, words
from core import __version__
from core.errors import EftError, Unauthorized

PREFIX = "/ui"
HERE = Path(__file__).resolve().parent
STATIC = HERE / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
}
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@cache
def static_file(name: str) -> tuple[bytes, str] | None:
    """Bytes and hash of a file that pages load; None where there is none of this name."""
    path = STATIC / name
    if path.suffix not in TYPES or path.parent != STATIC or not path.is_file():
        return None
    data = path.read_bytes()
    return data, hashlib.sha256(data).hexdigest()[:16]


def _static(name: str) -> str:
    """Path below the prefix, with the hash of the content: a browser keeps it until it changes."""
    found = static_file(name)
    assert found is not None, name
    return f"static/{name}?v={found[1]}"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


@cache
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {name: getattr(words, name) for name in words.FILTERS}
    made.filters |= {"as_yaml": _yaml, "as_json": lambda value: json.dumps(value, ensure_ascii=False, indent=2)}
    made.filters["quoted"] = lambda text: quote(str(text), safe="")
    made.filters["query"] = lambda pairs: urlencode({k: v for k, v in pairs.items() if v not in (None, "")}, doseq=True)
    made.globals |= {"static": _static, "version": __version__, "words": words}
    return made


def to_root(path: str) -> str:
    """The relative way from a page to the service's root: links hold behind any path prefix of a proxy."""
    return "../" * (path.count("/") - 1) or "./"


def page(request: Request, template: str, status: int = 200, /, **values: Any) -> Response:
    """A page. `principal` comes from the request, where it is signed in."""
    principal: Principal | None = getattr(request.state, "principal", None)
    cookie = request.cookies.get(sessions.COOKIE)
    shell = {
        "principal": principal,
        "csrf": sessions.token(cookie) if cookie and principal is not None else "",
        "root": to_root(request.url.path),
        "here": request.url.path,
        "base_url": str(request.base_url).rstrip("/"),
    }
    text = environment().get_template(template).render(**shell, **values)
    return HTMLResponse(text, status, headers=HEADERS)


def may_write(principal: Principal) -> bool:
    """Whether to show buttons that change things."""
    return lacks(principal, Policy(Scope.WRITE, Role.MEMBER)) is None


def error_page(request: Request, error: EftError) -> Response:
    """An error as a page; without a session, the way to the sign-in."""
    if isinstance(error, Unauthorized):
        return to_sign_in(request, "ended" if sessions.COOKIE in request.cookies else "")
    reply = page(request, "error.html", error.status, error=error, request_id=request_id.get())
    if isinstance(error, RateLimited):
        reply.headers["retry-after"] = str(error.retry_after)
    return reply


class PageRoute(APIRoute):
    """A route whose errors are pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            try:
                return await handle(request)
            except EftError as error:
                return error_page(request, error)
            except RequestValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"][1:])
                return error_page(request, BadRequest(f"`{field}`: {first['msg']}", field=field))

        return handled


def to_sign_in(request: Request, why: str) -> Response:
    """303 to the sign-in, which leads back here."""
    query = request.url.query
    target = request.url.path.removeprefix(PREFIX).lstrip("/") + (f"?{query}" if query else "")
    where = f"{to_root(request.url.path)}ui/signin?" + urlencode({"next": target, "why": why})
    return RedirectResponse(where, 303, headers=HEADERS)
