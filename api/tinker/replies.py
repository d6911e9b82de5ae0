"""Errors in the shape that Tinker's SDK shows."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi.responses import Response

from api.context import request_id
from api.http.errors import ErrorResponse


def render(status: int, error: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response:
    """The errors of `/api/v1`. A conflict is a 400 there: the SDK sends a 409 again for five minutes."""
    if status in (HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY):
        status = HTTPStatus.BAD_REQUEST
    told = {"code": error["code"], "field": error.get("field"), "request_id": request_id.get()}
    return ErrorResponse({"detail": error["message"], **told}, status, headers=dict(headers or {}))
