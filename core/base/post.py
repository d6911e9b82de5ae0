"""One POST to a stranger: the address looked up once, no redirects, no proxies, a bound on time and on what is read."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.base.addresses import WEBHOOKS, HttpTarget, Lookup, NotAllowed, parse, resolve

MOST_BYTES = 4096
"""Bytes that are read of a response's body, so that the connection closes cleanly, unless the caller wants more."""
MOST_ADDRESSES = 3


@dataclass(frozen=True, slots=True)
class HttpReply:
    """What a target made of it."""

    status: int | None
    """None: there was no answer, and `error` says why."""
    error: str | None = None
    retry_after: float | None = None
    """Seconds, where the target asked for them."""
    body: bytes = field(default=b"", compare=False)
    """What was read of it."""

    @property
    def taken(self) -> bool:
        return self.status is not None and 200 <= self.status < 300


class _Watch:
    """Cuts the connection off when the time is over: a socket's own time-out begins anew with every byte."""

    def __init__(self, seconds: float) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self.rang = False
        self._ends = time.monotonic() + seconds
        self._timer = threading.Timer(seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def left(self) -> float:
        """Seconds; raises TimeoutError when there are none."""
        left = self._ends - time.monotonic()
        if left <= 0 or self.rang:
            raise TimeoutError
        return left

    def guard(self, sock: socket.socket) -> None:
        with self._lock:
            self._socket = sock
        self.left()

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._socket = None

    def _ring(self) -> None:
        with self._lock:
            self.rang = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # it is not connected any more


def post(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    allow: Sequence[str],
    seconds: float,
    lookup: Lookup = socket.getaddrinfo,
    setting: str = WEBHOOKS,
    most_bytes: int = MOST_BYTES,
) -> HttpReply:
    """Never raises for what the target, its name or the way there does. `setting`: the name of the one that `allow` is
    from; of the response's body at most `most_bytes` are read."""
    watch = _Watch(seconds)
    sock: socket.socket | None = None
    try:
        target = parse(url)
        sock = _connect(target, resolve(target, allow, lookup, setting=setting), watch)
        return _exchange(target, sock, watch, headers, body, most_bytes)
    except NotAllowed as error:
        return HttpReply(None, str(error))
    except socket.gaierror as error:
        return HttpReply(None, f"the name cannot be looked up: {error.strerror}")
    except TimeoutError:
        return HttpReply(None, f"no answer within {seconds:g} s")
    except ssl.SSLCertVerificationError as error:
        return HttpReply(None, f"its certificate is not good: {error.verify_message}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        if watch.rang:
            return HttpReply(None, f"no answer within {seconds:g} s")
        words = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        return HttpReply(None, f"the connection failed: {words}"[:200])
    finally:
        watch.stop()
        if sock is not None:
            sock.close()


def _connect(target: HttpTarget, addresses: Sequence[tuple[int, Any]], watch: _Watch) -> socket.socket:
    failure: OSError = OSError("the name has no address")
    for family, address in addresses[:MOST_ADDRESSES]:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(watch.left())
            sock.connect(address)
            if target.secure:
                sock = ssl.create_default_context().wrap_socket(
                    sock, server_hostname=target.host, do_handshake_on_connect=False
                )
                watch.guard(sock)
                sock.do_handshake()
            watch.guard(sock)
            return sock
        except OSError as error:  # ssl's are some, too
            sock.close()
            failure = error
            if isinstance(error, TimeoutError | ssl.SSLError):
                break
    raise failure


def _exchange(
    target: HttpTarget,
    sock: socket.socket,
    watch: _Watch,
    headers: Mapping[str, str],
    body: bytes,
    most_bytes: int,
) -> HttpReply:
    """`Host` and the name of the certificate stay the URL's; http.client opens no connection where there is one."""
    kind = http.client.HTTPSConnection if target.secure else http.client.HTTPConnection
    connection = kind(target.host, target.port)
    connection.sock = sock
    connection.auto_open = 0
    connection.request("POST", target.path, body=body, headers={**headers, "connection": "close"})
    with connection.getresponse() as response:
        status = response.status
        waits = response.getheader("retry-after", "")
        watch.left()  # http.client takes headers that were cut off for whole ones
        found = b""
        with contextlib.suppress(OSError, http.client.HTTPException):  # the answer is there, whatever follows it
            found = response.read(most_bytes)
    error = None
    if 300 <= status < 400:
        error = f"answered {status}; redirects are not followed"
    elif not 200 <= status < 300:
        error = f"answered {status}"
    return HttpReply(status, error, float(waits) if waits.isdecimal() and len(waits) < 7 else None, found)
