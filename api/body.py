"""Bodies of requests that are read by hand."""

from __future__ import annotations

from fastapi import Request

from core.errors import TooLarge


async def read_body(request: Request, most: int) -> bytes:
    """The body, never more than `most` bytes of it in memory. Raises TooLarge, before reading when it is announced."""
    error = TooLarge(f"a request has at most {most} bytes here; data goes to `POST /files`")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise error
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise error
    return bytes(body)
