"""Where `eft up` listens, and whose answer it takes for its own."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from box.instance import Instance
from box.ports import obstacle
from box.up import Supervisor
from core import HOME, health
from core.settings import Settings


def test_a_taken_port_is_told_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0", "localhost"):
            words = obstacle(host, port)
            assert words is not None and f"is taken by process {os.getpid()} (" in words and "--port" in words
    assert obstacle("127.0.0.1", port) is None, "and not any more"
    assert obstacle("127.0.0.1", 0) is None


@pytest.mark.parametrize("host", ["300.1.1.1", "203.0.113.7", "no-such-host.invalid", "x" * 300, "a b"])
def test_an_address_of_no_network_here(host: str) -> None:
    words = obstacle(host, 0)
    assert words is not None and f"{host} is not an address of this machine" in words and "--host" in words


class Impostor(http.server.BaseHTTPRequestHandler):
    """Says 200 to whatever is asked, as many services do."""

    said = ""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.said:
            self.send_header(health.START_HEADER, self.said)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("said", ["", "0123456789abcdef"])
def test_whoever_answers_there_is_not_taken_for_the_api(said: str, tmp_path: Path) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), type("Named", (Impostor,), {"said": said})) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        data = tmp_path / "data"
        data.mkdir()
        settings = Settings(data=data, port=other.server_address[1])
        supervisor = Supervisor(settings, Instance.take(data, patience=0), None)
        assert not supervisor._api_answers()
        other.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("option", "value", "code", "words"),
    [
        ("--port", "99999", 2, "'99999' is not a port: 0 to 65535"),
        ("--host", "300.1.1.1", 1, "300.1.1.1 is not an address of this machine"),
    ],
)
def test_wrong_options_end_it_at_once(option: str, value: str, code: int, words: str, tmp_path: Path) -> None:
    environment = os.environ | {"EFT_DATA": str(tmp_path / "data")}
    command = [sys.executable, "-m", "box.up", option, value]
    ended = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, timeout=280)
    assert (ended.returncode, ended.stdout) == (code, "") and words in ended.stderr, ended.stderr
    assert "Traceback" not in ended.stderr
