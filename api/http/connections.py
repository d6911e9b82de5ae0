"""Connections of people whom nobody knows yet: how many there are, and how long each may keep us waiting.

Whose a request is shows only when its head is there. Until then nothing protects the service but time and numbers: a
head has to come within HEAD_SECONDS of the connection, or of its first byte; the kernel cuts off a peer that does not
read what it asked for after UNREAD_SECONDS; and connections are bounded, in all and for one address. Where a bound is
reached, the connection that has waited longest without a request makes room for the new one. Where all are at work, the
new one gets 503.

Bodies have their deadlines where they are read (api/http/body.py, api/files/router.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.http.body_limits import network_of

log = logging.getLogger("eft.api.connections")

HEAD_SECONDS = 10.0
"""For the head of a request, from its first byte on; for that first byte of a new connection as long."""
IDLE_SECONDS = 75
"""Between two requests of a connection. Clients keep idle connections too: httpx, which eft's client and the public
SDKs use, for 5 seconds, nginx for 60. This is longer, because a request sent while its connection is being closed gets
no answer."""
UNREAD_SECONDS = 120.0
"""For a peer to take something of what was sent."""
OTHER_DESCRIPTORS = 256
"""What the process needs beside connections: databases, files that are sent or come in, its listening socket."""
ACCEPTED_AT_ONCE = 32
"""asyncio accepts so many connections before it lets one of them say anything, and those need descriptors, too."""
WAITING_TO_BE_ACCEPTED = 2048
"""In the kernel, which takes fewer where net.core.somaxconn says so."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_FULL_BODY = (
    b'{"error": {"code": "unavailable", "message": "too many connections are open here; try again in a moment", '
    b'"field": null, "request_id": "-"}}'
)


class ConnectionLimits:
    """The connections of one process: who has how many, and which of them wait without a request."""

    def __init__(self, most: int, most_of_one: int, trusted: Sequence[str] = ()) -> None:
        self.most = most
        self.most_of_one = most_of_one
        self._trusted = tuple(ipaddress.ip_network(one) for one in trusted)
        self._open = 0
        self._of: Counter[str] = Counter()
        self._waiting: dict[str, dict[Connection, None]] = {}
        """By name of the peer; those that have waited longest first."""
        self._oldest: dict[Connection, None] = {}

    @classmethod
    def within(cls, descriptors: int, most: int, most_of_one: int, trusted: Sequence[str] = ()) -> ConnectionLimits:
        """What the settings say, as far as the process's descriptors go. One address has half of them at most."""
        most = min(most, max(descriptors - OTHER_DESCRIPTORS, descriptors // 2))
        return cls(most, min(most_of_one, max(most // 2, 1)), trusted)

    def name(self, client: tuple[str, int] | None) -> str | None:
        """Name of the client that a connection counts for; None for a proxy that many people share."""
        if client is None:
            return "local"
        with suppress(ValueError):
            address = ipaddress.ip_address(client[0])
            if any(address.version == network.version and address in network for network in self._trusted):
                return None
        return network_of(client[0])

    def enter(self, connection: Connection) -> bool:
        """Count it. False: there is no room for it."""
        name = connection.peer
        if name is not None and self._of[name] >= self.most_of_one and not self._make_room(self._waiting.get(name)):
            return False
        if self._open >= self.most and not self._make_room(self._oldest):
            return False
        self._open += 1
        if name is not None:
            self._of[name] += 1
        return True

    def leave(self, connection: Connection) -> None:
        self.works(connection)
        self._open -= 1
        if (name := connection.peer) is not None:
            self._of[name] -= 1
            if not self._of[name]:
                del self._of[name]

    def waits(self, connection: Connection) -> None:
        """It has no request under way."""
        self._oldest[connection] = None
        if connection.peer is not None:
            self._waiting.setdefault(connection.peer, {})[connection] = None

    def works(self, connection: Connection) -> None:
        self._oldest.pop(connection, None)
        name = connection.peer
        if name is not None and (waiting := self._waiting.get(name)) is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[name]

    def _make_room(self, waiting: dict[Connection, None] | None) -> bool:
        if not waiting:
            return False
        next(iter(waiting)).cut()
        return True


class Connection(H11Protocol):
    """uvicorn's, with deadlines and bounds. A request's `state["gone"]` is set when its connection is lost."""

    bounds: ClassVar[ConnectionLimits]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.peer: str | None = None
        self._counted = False
        self._head_deadline: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self.app_state = self.app_state | {"gone": self._gone}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.peer = self.bounds.name(self.client)
        if not self.bounds.enter(self):
            _limited.warning("connections", "too many connections; the newest are refused (EFT_MAX_CONNECTIONS)")
            transport.write(_FULL % (len(_FULL_BODY), _FULL_BODY))
            transport.close()
            return
        self._counted = True
        own = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # a Unix socket has no such option
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_SECONDS * 1000))
        self._wait()
        self._arm()

    def data_received(self, data: bytes) -> None:
        if not self._counted:
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._disarm()
        self._uncount()
        super().connection_lost(exc)

    def cut(self) -> None:
        """It makes room: whatever it still has to say is not waited for."""
        self._uncount()
        self.transport.abort()

    def _look(self) -> None:
        """After each event: is a request under way, does a head begin, or does nothing happen?"""
        if not self._counted or self.transport.is_closing():
            return
        if self.conn.their_state is not h11.IDLE or self.conn.our_state is not h11.IDLE:
            self._disarm()
            self.bounds.works(self)
            return
        self._wait()
        if self.conn.trailing_data[0]:
            self._arm()

    def _wait(self) -> None:
        self.bounds.waits(self)

    def _arm(self) -> None:
        if self._head_deadline is None:
            self._head_deadline = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _disarm(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _too_slow(self) -> None:
        self._head_deadline = None
        self.transport.abort()

    def _uncount(self) -> None:
        if self._counted:
            self._counted = False
            self.bounds.leave(self)


class Limited:
    """Says the same thing once a second at most, with how often it happened."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, int]] = {}

    def warning(self, name: str, message: str) -> None:
        then, times = self._said.get(name, (-1.0, 0))
        now = time.monotonic()
        if then >= 0 and now - then < 1:
            self._said[name] = (then, times + 1)
            return
        self._said[name] = (now, 0)
        log.warning("%s%s", message, f" ({times} more since the last of these lines)" if times else "")


_limited = Limited()


def quiet_about_accept(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For `set_exception_handler`: asyncio tells each connection that it could not accept, with a traceback."""
    error = context.get("exception")
    if "accept" in str(context.get("message", "")) and isinstance(error, OSError):
        _limited.warning("accept", f"connections cannot be accepted: {error.strerror} (see `ulimit -n`)")
        return
    loop.default_exception_handler(context)


def listen_longer(servers: Sequence[asyncio.Server]) -> None:
    """Let the kernel hold a burst of connections that asyncio accepts ACCEPTED_AT_ONCE by ACCEPTED_AT_ONCE."""
    for server in servers:
        for listening in server.sockets:
            with socket.socket(fileno=listening.dup().detach()) as again:
                again.listen(WAITING_TO_BE_ACCEPTED)
