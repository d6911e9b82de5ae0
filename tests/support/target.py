"""A real HTTP server that webhooks are sent to: it writes down what comes, and answers as it was told to."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal


@dataclass(frozen=True)
class Got:
    """One request."""

    path: str
    headers: dict[str, str]
    """By lower-case names."""
    body: bytes


class Target:
    """`plan[path]`: what is answered next (a status, `hang`, or `drip`: a byte now and then); 200 when it is empty."""

    def __init__(self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.got: list[Got] = []
        self.plan: dict[str, deque[int | Literal["hang", "drip"]]] = defaultdict(deque)
        self.headers: dict[str, str] = {}
        """Headers of every answer."""
        self.over = threading.Event()
        target = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                plan = target.plan[self.path]
                what = plan.popleft() if plan else 200
                target.got.append(Got(self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                if what == "hang":
                    target.over.wait(280)
                    return
                if what == "drip":
                    for byte in b"HTTP/1.1 200 OK\r\nx-long: " + 1000 * b"a":
                        if target.over.wait(0.05):
                            return
                        self.wfile.write(bytes([byte]))
                    return
                self.send_response(int(what))
                if 300 <= int(what) < 400:
                    self.send_header("location", f"http://127.0.0.1:{target.port}/elsewhere")
                for name, value in target.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "6")
                self.end_headers()
                self.wfile.write(b"secret")

            def log_message(self, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # who hangs up is no news here
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def at(self, path: str) -> list[Got]:
        return [got for got in list(self.got) if got.path == path]

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def target(address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Target]:
    made = Target(address, port, tls)
    try:
        yield made
    finally:
        made.close()


def verifies(got: Got, secret: str, tolerance: float = 300.0) -> bool:
    """What https://www.standardwebhooks.com has a receiver do, written out."""
    message_id, sent = got.headers["webhook-id"], got.headers["webhook-timestamp"]
    if abs(time.time() - int(sent)) > tolerance:
        return False
    key = base64.b64decode(secret.split("_", 1)[1])
    wanted = base64.b64encode(
        hmac.digest(key, f"{message_id}.{sent}.".encode() + got.body, hashlib.sha256().name)
    ).decode()
    versions = [part.split(",", 1) for part in got.headers["webhook-signature"].split(" ")]
    return any(version == "v1" and hmac.compare_digest(signature, wanted) for version, signature in versions)


def until(holds: Callable[[], object], seconds: float = 90.0, step: Callable[[], object] = lambda: None) -> None:
    """Do `step` again and again until it holds: the more seldom, the longer it takes."""
    began = time.monotonic()
    while not holds():
        step()
        waited = time.monotonic() - began
        assert waited < seconds, "it does not come to pass"
        time.sleep(min(0.2, max(0.02, waited / 10)))
