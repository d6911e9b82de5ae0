"""Without a key nobody slows the service: connections, heads of requests, routes that ask for no key, proxies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import os
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from fastapi import Request

from api.errors import RequestTimeout
from api.http import body
from api.http.connections import Connection, ConnectionLimits, quiet_about_accept
from core.descriptors import raise_limit
from core.settings import Settings, crosses_in_clear
from tests.service.conftest import Api, StartApi
from tests.support.service import wait_for

DESCRIPTORS = 512
WRONG = "eft_00000000_" + "0" * 40


@contextlib.contextmanager
def connected(api: Api, count: int, send: bytes = b"") -> Iterator[list[socket.socket]]:
    port = int(api.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            if send:
                with contextlib.suppress(OSError):
                    one.sendall(send)
            found.append(one)
        yield found


def is_cut(one: socket.socket) -> bool:
    """Whether the other side has ended it."""
    one.setblocking(False)
    try:
        return one.recv(1 << 16, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def said(api: Api, raw: bytes) -> bytes:
    """All that is answered to these bytes, until the connection is closed."""
    with connected(api, 1, raw) as (one,):
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := one.recv(1 << 16):
                found += piece
        return found


def test_connections_without_a_request_stop_nobody(start_api: StartApi) -> None:
    """Twice as many as the process may have descriptors: half of them say nothing, the others begin to."""
    assert raise_limit() > 3 * DESCRIPTORS
    with start_api(descriptors=DESCRIPTORS) as api:
        assert "plain HTTP" not in api.log(), "keys do not leave this machine"
        head = b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-A: b"
        with connected(api, DESCRIPTORS) as idle, connected(api, DESCRIPTORS, head) as begun:
            began = time.monotonic()
            assert httpx.get(f"{api.url}/healthz", timeout=60).status_code == 200
            assert api.http.get("/me").status_code == 200
            assert time.monotonic() - began < 15
            opened = len(os.listdir(f"/proc/{api.process.pid}/fd"))
            assert opened < DESCRIPTORS, "some are left for its own work"
            # Bytes one by one are no way around the deadline: it holds for the whole head.
            with connected(api, 1, b"G") as (slow,):

                def trickle() -> bool:
                    with contextlib.suppress(OSError):
                        slow.send(b"E")
                    return is_cut(slow)

                wait_for(trickle, 60, "the slow head to be cut")
            wait_for(lambda: all(map(is_cut, [*idle, *begun])), 60, "all of them to be cut")
        assert api.log_file.stat().st_size < 1 << 20
        assert api.http.get("/me").status_code == 200


def test_a_connection_outlasts_those_that_clients_keep(api: Api) -> None:
    """httpx reuses one for five seconds. Were it closed here at that moment, a request would get no answer."""
    with contextlib.closing(http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=60)) as one:
        for seconds in (6, 0):
            one.request("GET", "/healthz")  # on the connection of the one before, or RemoteDisconnected
            assert one.getresponse().read() == b'{"status":"ok"}'
            time.sleep(seconds)


class Waiting(Connection):
    """A connection that nobody serves, to count."""

    def __init__(self, peer: str | None) -> None:
        self.peer = peer
        self.was_cut = False
        self.bounds_of: ConnectionLimits

    def cut(self) -> None:
        self.was_cut = True
        self.bounds_of.leave(self)


def entered(bounds: ConnectionLimits, peer: str | None, *, waits: bool = True) -> Waiting | None:
    one = Waiting(peer)
    one.bounds_of = bounds
    if not bounds.enter(one):
        return None
    if waits:
        bounds.waits(one)
    return one


def test_who_has_waited_longest_makes_room() -> None:
    bounds = ConnectionLimits(4, 2, ["10.0.0.0/8"])
    first, second = entered(bounds, "a"), entered(bounds, "a")
    other = entered(bounds, "b")
    assert first and second and other
    third = entered(bounds, "a")
    assert third and first.was_cut and not second.was_cut and not other.was_cut, "of the same address"
    bounds.works(second)
    bounds.works(third)
    assert entered(bounds, "a") is None, "both are at work"
    fourth = entered(bounds, "c")
    assert fourth and entered(bounds, "d") and other.was_cut and not fourth.was_cut, "the oldest of all"
    assert bounds.name(("10.1.2.3", 1)) is None and bounds.name(("192.0.2.1", 1)) == "192.0.2.1"
    assert bounds.name(("2001:db8::1", 1)) == bounds.name(("2001:db8::2", 1))


def test_bounds_stay_within_the_descriptors() -> None:
    assert (
        ConnectionLimits.within(65_536, 4096, 1024).most,
        ConnectionLimits.within(65_536, 4096, 1024).most_of_one,
    ) == (4096, 1024)
    assert (ConnectionLimits.within(1024, 4096, 1024).most, ConnectionLimits.within(1024, 4096, 1024).most_of_one) == (
        768,
        384,
    )


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)

    async def never() -> dict[str, object]:
        await asyncio.sleep(3600)
        return {}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"10")]}
    with pytest.raises(RequestTimeout):
        asyncio.run(body.read_body(Request(scope, never), 100))


def test_two_lengths_are_refused_and_the_connection_is_closed(api: Api) -> None:
    head = b"POST /jobs HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = said(api, head + b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert b"Transfer-Encoding" in answer and b"connection: close" in answer


def test_nobody_is_sent_where_the_host_header_says(api: Api) -> None:
    reply = api.http.get("/jobs/", headers={"host": "evil.example"})
    assert reply.status_code == 404 and "location" not in reply.headers


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_the_reference_is_made_once(api: Api, path: str) -> None:
    first, second = api.http.get(path), api.http.get(path)
    assert first.status_code == 200 and first.content == second.content
    assert first.headers["etag"] == second.headers["etag"]
    again = api.http.get(path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def wrong(api: Api, forwarded: str) -> int:
    headers = {"authorization": f"Bearer {WRONG}", "x-forwarded-for": forwarded}
    return httpx.get(f"{api.url}/me", headers=headers).status_code


def test_forwarded_addresses_count_from_nobody_by_default(start_api: StartApi) -> None:
    with start_api(rate_strangers_per_minute=5, rate_public_per_minute=20) as api:
        assert api.http.get("/me").status_code == 200
        assert [wrong(api, f"203.0.113.{at}") for at in range(7)] == [401] * 5 + [429] * 2
        for path in ("/readyz", "/docs", "/openapi.json", "/version", "/healthz"):
            assert httpx.get(api.url + path).status_code in (200, 503), path
        answers = (httpx.get(f"{api.url}/readyz") for _ in range(500))  # on a slow machine some are allowed meanwhile
        refused = next(one for one in answers if one.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert api.http.get("/me").status_code == 200, "whoever has a key is not concerned"


def test_forwarded_addresses_count_from_named_proxies(start_api: StartApi) -> None:
    with start_api(rate_strangers_per_minute=3, trusted_proxies="127.0.0.0/8,::1") as api:
        assert [wrong(api, f"203.0.113.{at}") for at in range(8)] == [401] * 8
        assert [wrong(api, "198.51.100.7") for _ in range(4)] == [401] * 3 + [429]
        # What stands before the address that the proxy has seen is the client's own word.
        assert wrong(api, "192.0.2.9, 198.51.100.7") == 429


def test_keys_in_clear_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, more, told in (
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("10.1.2.3", {}, True),
        ("lab.example", {}, True),
        ("10.1.2.3", {"trusted_proxies": ("10.1.2.4",)}, False),
        ("10.1.2.3", {"public_url": "https://eft.lab.example"}, False),
    ):
        words = crosses_in_clear(Settings(host=host, **more))
        assert (words is not None) is told, host
        assert words is None or ("in clear" in words and "EFT_TRUSTED_PROXIES" in words and "\n" not in words)


def test_connections_that_cannot_be_accepted_are_told_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    context = {
        "message": "socket.accept() out of system resource",
        "exception": OSError(errno.EMFILE, "Too many open files"),
    }
    began = time.monotonic()
    for _ in range(10_000):
        quiet_about_accept(loop, context)
    seconds = time.monotonic() - began
    said = [record.getMessage() for record in caplog.records]
    assert 1 <= len(said) <= seconds + 1 and "Too many open files" in said[0]
    assert not any(record.exc_info for record in caplog.records)
    quiet_about_accept(loop, {"message": "something else", "exception": RuntimeError("a defect")})
    assert "something else" in caplog.records[-1].getMessage() and caplog.records[-1].exc_info
    loop.close()
