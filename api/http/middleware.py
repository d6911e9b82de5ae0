"""Around every request: its id, one log line, the last net for defects, and what is left of a refused body."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.context import request_id
from api.http import errors
from api.metrics.latencies import Latencies

log = logging.getLogger("eft.api")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
DRAIN_BYTES = 16 << 20
DRAIN_SECONDS = 2.0
DISCONNECTED = 499
"""Nginx's number for a client that left before the answer; it is only logged."""


class RequestContext:
    """Pure ASGI, so that streams pass through it untouched."""

    def __init__(self, app: ASGIApp, latencies: Latencies) -> None:
        self.app = app
        self.latencies = latencies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        theirs = given if _SANE_ID.fullmatch(given) else None
        # Ours always: what stands in the audit and in jobs is not for a client to choose.
        identity = f"req-{secrets.token_hex(12)}"
        token = request_id.set(identity)
        body = _RequestBody(headers, receive)
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self.latencies.note(scope, status, time.monotonic() - began)
                out = MutableHeaders(scope=message)
                out["x-request-id"] = identity
                if theirs is not None:
                    out["x-client-request-id"] = theirs
                out["x-content-type-options"] = "nosniff"
                if not await body.drained():
                    out["connection"] = "close"
            await send(message)

        try:
            if "content-length" in headers and "transfer-encoding" in headers:
                # RFC 9112, 6.3: somebody between us and the client may have cut the stream at another place.
                await errors.two_lengths(scope)(scope, body.receive, answer)
            else:
                await self.app(scope, body.receive, answer)
        except ClientDisconnect:
            status = DISCONNECTED
        except Exception:
            log.exception("%s %s failed", scope["method"], _path(scope))
            if status:
                raise  # half an answer is out: only closing the connection tells the client
            await errors.internal(scope)(scope, body.receive, answer)
        finally:
            took = (time.monotonic() - began) * 1000
            who = _who(scope) + ("" if theirs is None else f" as {theirs}")
            log.info("%s %s %d %.0f ms%s", scope["method"], _path(scope), status or DISCONNECTED, took, who)
            request_id.reset(token)


class _RequestBody:
    """Counts what a handler read. A client that is still sending may not look for the answer before it is through."""

    def __init__(self, headers: Headers, receive: Receive) -> None:
        self._receive = receive
        length = headers.get("content-length", "0")
        self._ended = length == "0" and "transfer-encoding" not in headers
        self._length = int(length) if length.isdecimal() else 0
        self._expects = headers.get("expect", "").lower() == "100-continue"
        self._read = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
        else:
            self._ended = True
        return message

    async def drained(self) -> bool:
        """Read on for a moment behind a refusal. False: there is more than that, close the connection."""
        if self._ended:
            return True
        if (self._expects and self._read == 0) or self._length - self._read > DRAIN_BYTES:
            return False
        stop = self._read + DRAIN_BYTES
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self._ended and self._read < stop:
                    await self.receive()
        except TimeoutError:
            return False
        return self._ended


def _path(scope: Scope) -> str:
    """As it was sent, percent signs and all: nothing that breaks a log line."""
    raw: bytes = scope.get("raw_path", b"?")
    return raw.decode("ascii", "replace")[:500]


def _who(scope: Scope) -> str:
    """The user and the key, by their ids, once the request has shown them."""
    principal = scope.get("state", {}).get("principal")
    return "" if principal is None else f" by {principal.user_id} with {principal.key_id}"
