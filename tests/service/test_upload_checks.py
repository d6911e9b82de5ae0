"""Uploads are checked apart: others are answered meanwhile, and a check has bounds and ends when its client leaves."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from api.files import checking
from api.files.checking import Checkers
from core.data import apart
from core.data.check import FileCheck
from core.data.faults import MAX_FAULTS
from core.errors import TooLarge
from tests.service.conftest import ROWS, Api, jsonl
from tests.support.service import wait_for


def slow_parquet(rows: int) -> bytes:
    """A small file whose rows take long: each is a chat of many short turns."""
    turns = [{"role": role, "content": f"{at}"} for at in range(30) for role in ("user", "assistant")]
    out = io.BytesIO()
    pq.write_table(pa.table({"messages": pa.array([turns]).take(pa.array([0] * rows))}), out)
    return out.getvalue()


def processes() -> dict[int, int]:
    """Those of core.data.apart: number and parent."""
    found: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if b"core.data.apart" in (entry / "cmdline").read_bytes():
                    found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def source(api: Api) -> int | None:
    """The process of this API that others are forked from."""
    return next((pid for pid, parent in processes().items() if parent == api.process.pid), None)


def checks(api: Api) -> list[int]:
    """The processes that check a file now."""
    own = source(api)
    return [pid for pid, parent in processes().items() if parent == own]


def test_others_are_answered_while_a_file_is_checked(api: Api) -> None:
    data, answers = slow_parquet(1000), list[httpx.Response]()
    sending = threading.Thread(
        target=lambda: answers.append(
            httpx.post(
                f"{api.url}/files?filename=slow.parquet",
                content=data,
                headers={"authorization": f"Bearer {api.key}", "content-type": "application/octet-stream"},
                timeout=300,
            )
        )
    )
    sending.start()
    (pid,) = wait_for(lambda: checks(api), 120, "the check to begin")
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert f"Max cpu time              {apart.CPU_SECONDS} " in limits
    assert str(apart.MAX_BYTES) in limits
    answered = 0
    while sending.is_alive() and answered < 10:
        assert api.http.get("/me").status_code == 200
        answered += 1
    assert answered == 10, "before the check was over"
    sending.join()
    assert answers[0].status_code == 201 and answers[0].json()["rows"] == 1000, answers[0].text
    wait_for(lambda: not checks(api), 60, "the check to be gone")


def send_and_leave(api: Api, data: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", int(api.url.rpartition(":")[2])), timeout=60)
    head = (
        f"POST /files?filename=left.parquet HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {api.key}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    one.sendall(head.encode() + data)
    return one


def test_a_check_ends_when_its_client_leaves(api: Api) -> None:
    with send_and_leave(api, slow_parquet(8000)):
        wait_for(lambda: checks(api), 120, "the check to begin")
        assert checks(api)
    wait_for(lambda: not checks(api), 60, "the check to be ended")
    wait_for(lambda: not list(api.layout.uploads.iterdir()), 60, "nothing to be kept")
    assert "left.parquet" not in api.http.get("/files?limit=200").text
    assert api.upload(jsonl(ROWS))["rows"] == len(ROWS)


def test_a_check_that_reaches_its_bound_is_told_and_costs_nobody_else(api: Api) -> None:
    """The kernel ends it, as here somebody does."""
    with send_and_leave(api, slow_parquet(8000)) as client:
        (pid,) = wait_for(lambda: checks(api), 120, "the check to begin")
        # Ended before its first frame, it would be one that could not be started.
        wait_for(lambda: any(part.stat().st_size for part in api.layout.uploads.iterdir()), 120, "bytes to be checked")
        os.kill(pid, signal.SIGXCPU)
        told = b""
        while b"processor time" not in told and (more := client.recv(1 << 16)):  # the head may come by itself
            told += more
    assert told.startswith(b"HTTP/1.1 413 ") and b"processor time" in told, told
    own = source(api)
    assert own is not None
    os.kill(own, signal.SIGKILL)
    assert api.upload(jsonl(ROWS))["rows"] == len(ROWS), "there is another one"


def test_faults_without_end_stop_a_check_within_one_piece() -> None:
    check = FileCheck(most_faults=MAX_FAULTS)
    check.feed(b"{}\n" * 300_000)
    assert check.fault_count == MAX_FAULTS + 1
    assert check.finish().fault_count == MAX_FAULTS + 1
    everything = FileCheck()
    everything.feed(b"{}\n" * 30_000)
    assert everything.finish().fault_count == 30_000


def test_the_report_is_the_same_from_another_process(tmp_path: Path) -> None:
    checkers = Checkers()
    try:
        for data in (jsonl(ROWS), b'{"text": ""}\n' * 3, b"", b"prompt,completion\n=a,b\n", b'{"text": "\\ud800"}\n'):
            (tmp_path / "rows").write_bytes(data)
            here = FileCheck()
            here.feed(data)
            check = checkers.begin("auto", {})
            check.send(data)
            assert check.answer() is None
            assert check.finish(tmp_path / "rows") == here.finish(tmp_path / "rows")
            check.end()
            check.end()
    finally:
        checkers.close()


def test_an_ended_check_answers_whoever_waits_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checking, "MOST", 1)
    checkers = Checkers()
    try:
        check = checkers.begin("auto", {})
        with pytest.raises(checking.ServiceUnavailable):
            checkers.begin("auto", {})
        check.end()
        with pytest.raises(TooLarge):
            check.finish(tmp_path / "rows")
        checkers.begin("auto", {}).end()
    finally:
        checkers.close()
