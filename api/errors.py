"""One error shape for everything: {"error": {"code", "message", "field", "faults"?, "request_id"}}."""

from __future__ import annotations

import difflib
import json
import logging
import sqlite3
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.routing import Match

from api.context import request_id
from core.errors import EftError, NoSpace

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


class BadRequest(EftError):
    """The request itself is wrong: a parameter, a header, its encoding."""

    code = "invalid_request"
    status = 422


class UnsupportedMediaType(EftError):
    code = "unsupported_media_type"
    status = 415


class RangeNotSatisfiable(EftError):
    code = "range_not_satisfiable"
    status = 416


class Gone(EftError):
    """The database knows it, the disk no longer has it."""

    code = "gone"
    status = 410


class RequestTimeout(EftError):
    code = "timeout"
    status = 408


class ServiceUnavailable(EftError):
    """Something behind the API is down; the same request may go through in a moment."""

    code = "unavailable"
    status = 503


class RateLimited(EftError):
    """Too many requests; `retry_after` whole seconds later there is room for one."""

    code = "rate_limited"
    status = 429

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def render(error: EftError, headers: dict[str, str] | None = None) -> JSONResponse:
    return _body(error.status, error.as_dict(), headers)


def internal() -> JSONResponse:
    """A defect of ours: the log has the traceback under this request's id, the user has the id."""
    message = "something went wrong on our side; the log has more under this request id"
    return _body(500, {"code": "internal", "message": message, "field": None})


def two_lengths() -> JSONResponse:
    message = "the request has both Content-Length and Transfer-Encoding; send one of them"
    error = {"code": "invalid_request", "message": message, "field": "transfer-encoding"}
    return _body(400, error, {"connection": "close"})


def install(app: FastAPI) -> None:
    app.add_exception_handler(EftError, _eft_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(kind, _database_error)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: the error statuses it may answer, beside 401, 403, 422, 429, 500, 503 and 507, which
    any may: an unknown parameter, a database that does not answer or has no room; and with 413 408, since what has a
    body may be late with it."""
    return {
        status: {"model": ErrorBody, "description": HTTPStatus(status).phrase}
        for status in sorted({401, 403, 422, 429, 500, 503, 507, *statuses, *({408} if 413 in statuses else ())})
    }


def nearest(word: str, options: list[str]) -> str:
    close = difflib.get_close_matches(word.lower(), options, n=1, cutoff=0.5)
    if close:
        return f"did you mean `{close[0]}`?"
    return "known here: " + ", ".join(f"`{option}`" for option in options)


def printable(text: str) -> str:
    """A user's text inside a message: short, and with nothing in it that a terminal would obey."""
    safe = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[:80])
    return safe + ("…" if len(text) > 80 else "")


class ErrorResponse(JSONResponse):
    """An error, which must come out whatever it holds: half of a surrogate pair from a path, say."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="replace")


def _body(status: int, error: dict[str, Any], headers: dict[str, str] | None = None) -> JSONResponse:
    return ErrorResponse({"error": {**error, "request_id": request_id.get()}}, status, headers=headers)


def _eft_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EftError)
    match error:
        case RateLimited():
            return render(error, {"Retry-After": str(error.retry_after)})
        case _:
            return render(error, {"WWW-Authenticate": "Bearer"} if error.status == 401 else None)


def _database_error(_: Request, error: Exception) -> JSONResponse:
    """Down, overloaded or full. Other errors of the database are defects."""
    log.error("the database failed", exc_info=error)
    original = getattr(error, "orig", None)
    if getattr(original, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL or getattr(original, "sqlstate", "") == "53100":
        return render(NoSpace("the database's disk is full; the administrator must make room"))
    return render(ServiceUnavailable("the database does not answer; try again in a moment"), {"Retry-After": "2"})


def _http_error(request: Request, error: Exception) -> JSONResponse:
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
    return _body(error.status_code, {"code": code, "message": message, "field": None}, headers)


def _methods(request: Request) -> list[str]:
    """Every method that some route has for this path; Starlette names only those of the first one it finds."""
    methods: set[str] = set()
    for route in request.app.state.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)


def _validation_error(_: Request, error: Exception) -> JSONResponse:
    """FastAPI's own: a query parameter or header of the wrong form."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for item in error.errors()[:50]:
        field = ".".join(str(part) for part in item["loc"][1:]) or None
        message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        faults.append({"code": "invalid_value", "message": message[:1].lower() + message[1:], "field": field})
    first = faults[0]
    message = f"{first['field']}: {first['message']}" if first["field"] else str(first["message"])
    return _body(422, {"code": "invalid_request", "message": message, "field": first["field"], "faults": faults})
