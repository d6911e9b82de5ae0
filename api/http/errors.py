"""Errors as responses: {"error": {"code", "message", "field", "faults"?, "request_id"}}, or the shape of a router."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Protocol, cast

from fastapi import FastAPI, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from api.context import request_id
from api.errors import RateLimited, ServiceUnavailable, printable
from core.errors import EftError, NoSpace, plainly

log = logging.getLogger("eft.api")

CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media_type"}


class FaultView(BaseModel):
    """One thing wrong with one place of the input."""

    code: str
    message: str
    field: str | None
    line: int | None = None
    """Line or row number in a data file; the first one, where several have this fault."""
    times: int | None = None
    """Number of lines of a data file that have this fault, where several do."""


class ErrorView(BaseModel):
    """`message` says what to do; `field` is the dotted path of the first fault."""

    code: str
    message: str
    field: str | None
    faults: list[FaultView] | None = None
    report: dict[str, Any] | None = None
    """What a refused data file is, how many of its rows are good, and how many faults it has."""
    request_id: str


class ErrorBody(BaseModel):
    """Every reply that is not a success."""

    error: ErrorView


class ErrorRenderer(Protocol):
    """Turns an error into a response: the shape that the clients of a router expect."""

    def __call__(self, status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response: ...


def render(error: EftError, scope: Scope, headers: Mapping[str, str] | None = None) -> Response:
    return _body(scope, error.status, error.as_dict(), headers)


def internal(scope: Scope) -> Response:
    """A defect of eft: the log has the traceback under this request's id, and the user has the id."""
    message = "something went wrong on our side; the log has more under this request id"
    return _body(scope, 500, {"code": "internal", "message": message, "field": None})


def two_lengths(scope: Scope) -> Response:
    message = "the request has both Content-Length and Transfer-Encoding; send one of them"
    error = {"code": "invalid_request", "message": message, "field": "transfer-encoding"}
    return _body(scope, 400, error, {"connection": "close"})


def install(app: FastAPI, renderers: Mapping[str, ErrorRenderer] = MappingProxyType({})) -> None:
    """Answer every error of `app`. `renderers`: the prefix of a router's paths → the shape of its errors; all other
    paths have eft's (`render_eft`)."""
    app.state.renderers = dict(sorted(renderers.items(), key=lambda item: -len(item[0])))
    app.add_exception_handler(EftError, _eft_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(kind, _database_error)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: the error statuses it may answer, beside 401, 403, 422, 429, 500, 503 and 507, which
    any may: an unknown parameter, a database that does not answer or has no room; and with 413 408, since what has a
    body may be late with it. The document has the model once (`error_schemas`): FastAPI would make a validator of it
    for each status of each route, 1,400 of them at each start."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in sorted({401, 403, 422, 429, 500, 503, 507, *statuses, *({408} if 413 in statuses else ())})
    }


def error_schemas() -> dict[str, Any]:
    """Schemas of the document's components that `responses` refers to."""
    schema = ErrorBody.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
    found: dict[str, Any] = {**schema.pop("$defs", {}), ErrorBody.__name__: schema}
    return cast("dict[str, Any]", jsonable_encoder(found, exclude_none=True))  # as FastAPI writes the others


class ErrorResponse(JSONResponse):
    """An error, which must come out whatever it holds: half of a surrogate pair from a path, say."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="replace")


def render_eft(status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response:
    """The shape of eft's own routes."""
    return ErrorResponse({"error": {**error, "request_id": request_id.get()}}, status, headers=headers)


def _body(scope: Scope, status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    path, renderers = scope["path"], scope["app"].state.renderers
    within = (one for prefix, one in renderers.items() if path == prefix or path.startswith(f"{prefix}/"))
    return next(within, render_eft)(status, error, headers)


def _eft_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EftError)
    match error:
        case RateLimited():
            return render(error, request.scope, {"Retry-After": str(error.retry_after)})
        case _:
            return render(error, request.scope, {"WWW-Authenticate": "Bearer"} if error.status == 401 else None)


def _database_error(request: Request, error: Exception) -> Response:
    """Down, overloaded or full. Other errors of the database are defects."""
    log.error("the database failed", exc_info=error)
    original = getattr(error, "orig", None)
    if getattr(original, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL or getattr(original, "sqlstate", "") == "53100":
        message = "the database's disk is full; the administrator must make room"
        return render(NoSpace(message), request.scope)
    away = ServiceUnavailable("the database does not answer; try again in a moment")
    return render(away, request.scope, {"Retry-After": "2"})


def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, no such method."""
    assert isinstance(error, HTTPException)
    path = printable(request.url.path)
    match error.status_code:
        case 404:
            message = f"there is no `{path}` here; /docs lists what there is"
        case 405:
            message = f"`{path}` does not answer {printable(request.method)}"
        case _:
            message = str(error.detail)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    code = CODES.get(error.status_code, "invalid_request")
    return _body(request.scope, error.status_code, {"code": code, "message": message, "field": None}, headers)


def _methods(request: Request) -> list[str]:
    """Every method that some route has for this path; Starlette names only those of the first one it finds."""
    methods: set[str] = set()
    for route in request.app.state.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


def _validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's own: a query parameter or header of the wrong form."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for item in error.errors()[:50]:
        field = ".".join(str(part) for part in item["loc"][1:]) or None
        faults.append({"code": "invalid_value", "message": plainly(item["msg"]), "field": field})
    first = faults[0]
    message = f"{first['field']}: {first['message']}" if first["field"] else str(first["message"])
    return _body(
        request.scope, 422, {"code": "invalid_request", "message": message, "field": first["field"], "faults": faults}
    )
