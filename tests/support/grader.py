"""An endpoint that scores answers, for the reward `http`: the share of their letters that are among the first half."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answering = Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes]]
"""Status, headers and body to a request."""


class Grader(ThreadingHTTPServer):
    """Listens on a free port of this machine for as long as the process lives."""

    daemon_threads = True

    def __init__(self, answer: Answering) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.keys: Counter[str] = Counter()
        """How often each Idempotency-Key was sent."""
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        """Headers and bodies."""
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score?by=letters"


class _Handler(BaseHTTPRequestHandler):
    server: Grader

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys[self.headers["idempotency-key"]] += 1
        self.server.asked.append(({name.lower(): value for name, value in self.headers.items()}, asked))
        status, headers, body = self.server.answer(asked)
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def score(asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    values = [sum(one in "abcdefghijklm" for one in text) / (len(text) or 1) for text in asked["completions"]]
    return 200, {}, json.dumps({"rewards": values}).encode()


@cache
def grader() -> Grader:
    """The one of this process."""
    return Grader(score)
