"""What the wheel gives: both clients against a real server, and the command."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import inspect
import json
import socket
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path
from typing import Any

import eft
import pytest
from conftest import MODEL
from eft import ApiError, AsyncClient, Client, Unreachable

# --- what is installed -------------------------------------------------------------------------------


def test_nothing_of_the_service_comes_along() -> None:
    for name in ("api", "worker", "box", "core", "torch", "sqlalchemy", "fastapi", "celery", "redis"):
        assert importlib.util.find_spec(name) is None, name
    assert sys.prefix in eft.__file__, "the wheel, not a checkout"


def test_it_is_typed_and_says_its_version() -> None:
    assert (Path(eft.__file__).parent / "py.typed").is_file()
    assert importlib.metadata.version("eft") == eft.__version__
    for one in (Client, AsyncClient):
        for name, method in inspect.getmembers(one, inspect.isfunction):
            hints = typing.get_type_hints(method)
            wanted = set(inspect.signature(method).parameters) - {"self"} | {"return"}
            assert wanted <= set(hints), (one, name)


def test_both_clients_have_the_same_surface() -> None:
    def surface(one: type) -> dict[str, list[str]]:
        found = inspect.getmembers(one, inspect.isfunction)
        return {
            name.removeprefix("a") if name == "aclose" else name: list(inspect.signature(method).parameters)
            for name, method in found
            if not name.startswith("_")
        }

    assert surface(Client) == surface(AsyncClient)
    with Client() as here:
        there = AsyncClient()
        for part in ("access", "queue", "webhooks"):
            assert surface(type(getattr(here, part))) == surface(type(getattr(there, part))), part


# --- jobs --------------------------------------------------------------------------------------------


def test_submit_look_steer(client: Any, rows: Path) -> None:
    file = client.upload(rows)
    assert file.rows == 3 and client.file(file.id).sha256 == file.sha256
    assert [one.id for one in client.files(sha256=file.sha256)] == [file.id]
    spec = {"model": MODEL, "data": file.id, "name": "of the wheel"}
    assert client.resolve(spec)["method"]["type"] == "lora"
    key = f"key-{file.id}"
    job = client.submit(spec, idempotency_key=key)
    assert client.submit(spec, idempotency_key=key).id == job.id
    assert client.get(job.id).status == "queued" and job.id in {one.id for one in client.jobs(status=["queued"]).jobs}
    assert client.pause(job.id).status == "paused" and client.resume(job.id).status == "queued"
    assert job.id in {row["job"] for row in client.queue.show()}
    (rows, more), (all_rows, rest) = client.queue.look(limit=1), client.queue.look(limit=1000)
    assert 1 <= len(rows) <= 2 and len(rows) + more == len(all_rows) + rest
    assert client.cancel(job.id).status == "cancelled"
    assert [event.seq for event in client.events(job.id)] == [1, 2, 3, 4]
    assert client.wait(job.id).exit_code == 3
    assert [one.job.status for one in client.follow(job.id)] == ["cancelled"]
    assert [chunk.text for chunk in client.follow_logs(job.id)] == []
    assert client.metrics(job.id) == {} and client.artifacts(job.id) == []
    assert client.access.me()["user"]["name"] == "ada"
    assert client.version()["version"]


def test_errors_are_the_servers_words(client: Any) -> None:
    with pytest.raises(ApiError) as refused:
        client.submit({"model": MODEL, "data": "x", "metod": "lora"})
    assert refused.value.status == 422 and "metod" in {fault.field for fault in refused.value.faults}
    with pytest.raises(ApiError) as missing:
        client.get(f"job-{'0' * 26}")
    assert missing.value.status == 404 and missing.value.request_id


# --- tries -------------------------------------------------------------------------------------------


class Cutter:
    """In front of the server: lets so many connections die before their answers, or without taking all that is sent."""

    def __init__(self, url: str, dies: list[str]) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._target, self.dies, self.seen = (host, int(port)), dies, 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            self.seen += 1
            how = self.dies.pop(0) if self.dies else "lives"
            threading.Thread(target=self._pass, args=(near, how), daemon=True).start()

    def _pass(self, near: socket.socket, how: str) -> None:
        with near, socket.create_connection(self._target) as far:
            if how == "before":  # takes a little, and closes
                near.recv(1000)
                return
            up = threading.Thread(target=_copy, args=(near, far), daemon=True)
            up.start()
            if how == "after":  # all has come to the server, and its answer is lost
                far.recv(1)
                near.shutdown(socket.SHUT_RDWR)  # a close alone would wait for the thread that reads from it
                return
            _copy(far, near)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the other end has gone: that is what it is for


@pytest.mark.parametrize("how", ["before", "after"])
def test_what_was_lost_is_sent_again_and_done_once(server: str, rows: Path, how: str) -> None:
    cutter = Cutter(server, [how])
    with Client(cutter.url) as client:
        file = client.upload(rows)  # by its checksum: it asks whether the file has come
        cutter.dies = [how]
    with Client(cutter.url) as client:
        job = client.submit({"model": MODEL, "data": file.id})  # by its idempotency key
    with Client() as client:
        assert len(list(client.files(sha256=file.sha256))) == 1
        specs = {one.id: client.get(one.id).spec for one in client.jobs(limit=100).jobs}
        assert [one for one, spec in specs.items() if spec["data"]["train"]["id"] == file.id] == [job.id]
        client.cancel(job.id)
    assert not cutter.dies
    cutter.close()


def test_nobody_there() -> None:
    began = time.monotonic()
    with Client("http://127.0.0.1:1", "eft_x", patience=0.5) as nobody, pytest.raises(Unreachable, match="EFT_URL"):
        nobody.jobs()

    async def look() -> None:
        async with AsyncClient("http://127.0.0.1:1", "eft_x", patience=0.5) as nobody:
            await nobody.jobs()

    with pytest.raises(Unreachable, match="EFT_URL"):
        asyncio.run(look())
    assert time.monotonic() - began < 30


def test_many_at_once() -> None:
    """Tasks of one client do not stand in one another's way: each waits for its own answer, with tries of its own."""

    async def look() -> list[int]:
        async with AsyncClient() as client:
            pages = await asyncio.gather(*(client.jobs(limit=1) for _ in range(20)))
            return [len(page.jobs) for page in pages]

    assert len(asyncio.run(look())) == 20


# --- the command -------------------------------------------------------------------------------------


def test_the_command_is_there() -> None:
    command = str(Path(sys.executable).parent / "eft")
    done = subprocess.run([command, "ls", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "data" in json.loads(done.stdout)
    alone = subprocess.run([command, "up"], capture_output=True, text=True, check=False)
    assert alone.returncode == 2 and "EFT_HOME" in alone.stderr
