"""A file of the data root as a reply: ranges, ETag, a safe name; RFC 9110, sections 13 and 14."""

from __future__ import annotations

import re
from urllib.parse import quote

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from api.errors import Gone, RangeNotSatisfiable
from core.storage.store import ObjectChanged, ObjectReader, Store

CHUNK = 256 << 10
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


class FileReply(Response):
    """Opened before the first byte is sent, so that a file deleted meanwhile is still sent whole.

    Raises Gone when there is no such file or it does not have the size the database knows; RangeNotSatisfiable.
    """

    def __init__(
        self, request: Request, store: Store, key: str, *, size: int, sha256: str, filename: str, media_type: str
    ) -> None:
        etag = f'"{sha256}"'
        headers = {
            "accept-ranges": "bytes",
            "etag": etag,
            "cache-control": "private, no-cache",
            "content-disposition": disposition(filename),
        }
        self._source: ObjectReader | None = None
        self._start, self._length = 0, size
        status = 200
        if matches(request.headers.get("if-none-match"), etag):
            status, self._length = 304, 0
        else:
            wanted = request.headers.get("range")
            if wanted is not None and request.headers.get("if-range", etag) == etag:
                part = _parse(wanted, size)
                if part is not None:
                    self._start, self._length = part
                    status = 206
                    headers["content-range"] = f"bytes {self._start}-{self._start + self._length - 1}/{size}"
            if request.method == "GET":
                self._source = _open(store, key, size, self._start, self._length)
            headers["content-length"] = str(self._length)
        super().__init__(status_code=status, headers=headers, media_type=media_type)
        if status == 304:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            left = self._length
            while self._source is not None and left:
                chunk = await run_in_threadpool(self._source.read, min(CHUNK, left))
                if not chunk:
                    raise OSError("the file became shorter while it was sent")
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                left -= len(chunk)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._source is not None:
                self._source.close()
                self._source = None


def disposition(filename: str) -> str:
    """Always a download, never shown in place; the name once for old clients and once in full (RFC 6266)."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._- ") else "_" for char in filename)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(filename, safe='')}"


def _open(store: Store, key: str, size: int, start: int, length: int) -> ObjectReader:
    try:
        return store.open(key, size=size, start=start, length=length)
    except ObjectChanged as error:
        raise Gone("the file on the data root is not the one that was stored: its size has changed") from error
    except OSError as error:
        raise Gone("the file is no longer on the data root") from error


def matches(header: str | None, etag: str) -> bool:
    if header is None:
        return False
    return header.strip() == "*" or etag in (part.strip().removeprefix("W/") for part in header.split(","))


def _parse(header: str, size: int) -> tuple[int, int] | None:
    """Start and length of a single range; None for a form that may be ignored (several ranges, other units)."""
    form = _RANGE.fullmatch(header.strip())
    if form is None or form[1] == form[2] == "":
        return None
    if form[1] == "":  # the last n bytes
        length = min(int(form[2]), size)
        start = size - length
    else:
        start = int(form[1])
        end = min(int(form[2]), size - 1) if form[2] else size - 1
        length = end - start + 1
        if form[2] and int(form[2]) < start:
            return None
    if length <= 0 or start >= size:
        raise RangeNotSatisfiable(f"the file has {size} bytes; this range lies outside", field="range")
    return start, length
