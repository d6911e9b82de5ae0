"""Bodies of requests, read by hand: FastAPI would read all of one before it asks whose it is."""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from api.errors import BadRequest, RequestTimeout, UnsupportedMediaType
from core.base.attribute_docs import AttributeDocsModel
from core.errors import Fault, TooLarge, plainly
from core.spec.load import load_json, storable

BODY_SECONDS = 60.0
"""For a body that is not an upload."""

M = TypeVar("M", bound=BaseModel)


class Body(AttributeDocsModel):
    """Base of what small requests carry. Unknown fields are errors, and so are values of another type than the field's;
    attribute docstrings are the reference."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


async def read_body(request: Request, most: int) -> bytes:
    """The body, never more than `most` bytes of it in memory. Raises TooLarge, before reading when it is announced,
    and UnsupportedMediaType for one that is compressed: its size would be that of what comes out."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        words = "a body is not compressed here: send it without Content-Encoding"
        raise UnsupportedMediaType(words, field="content-encoding")
    error = TooLarge(f"a request has at most {most} bytes here; data goes to `POST /files`")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise error
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise error
    except TimeoutError as late:
        raise RequestTimeout(f"the body did not come within {BODY_SECONDS:.0f} seconds") from late
    return bytes(body)


async def read_optional_json(request: Request, model: type[M], most: int) -> M | None:
    """`read_json`; None for a request without a body, whatever its content type."""
    body = await read_body(request, most)
    return _parsed(request, body, model) if body else None


async def read_json(request: Request, model: type[M], most: int) -> M:
    """A JSON object that `model` describes. Raises BadRequest with a fault for every wrong field."""
    return _parsed(request, await read_body(request, most), model)


def _parsed(request: Request, body: bytes, model: type[M]) -> M:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("this route takes `Content-Type: application/json`", field="content-type")
    document = storable(load_json(body))
    try:
        return model.model_validate_json(json.dumps(document))  # JSON's strictness lets a text be a time
    except ValidationError as error:
        faults = []
        for item in error.errors(include_url=False, include_input=False)[:50]:
            field = ".".join(str(part) for part in item["loc"]) or None
            faults.append(Fault("invalid_value", plainly(item["msg"]), field))
        first = faults[0]
        words = f"{first.field}: {first.message}" if first.field else first.message
        raise BadRequest(words, field=first.field, faults=tuple(faults)) from error


def json_body(model: type[BaseModel], example: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    """For a route's `openapi_extra`."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {})), "example": example}}
    return {"requestBody": {"required": required, "content": content}}


def _inlined(node: Any, parts: dict[str, Any]) -> Any:
    """With what it refers to in place: the document's components are the models of replies."""
    match node:
        case {"$ref": str(reference)}:
            return _inlined(parts[reference.rpartition("/")[2]], parts)
        case dict():
            return {name: _inlined(value, parts) for name, value in node.items()}
        case list():
            return [_inlined(value, parts) for value in node]
        case _:
            return node
