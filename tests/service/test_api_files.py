"""Uploads: streamed, counted, checked; refused in words with nothing kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from api.app import create_app
from core.settings import Settings
from core.storage.layout import Layout
from tests.support.status import status_bytes

CHAT = b'{"messages": [{"role": "user", "content": "on"}, {"role": "assistant", "content": "lamp.on"}]}\n'
PAIR = b'{"prompt": "off", "completion": "lamp.off"}\n'
JSONL = {"content-type": "application/jsonl"}


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    return dict(reply.json()["error"])


def kept(api: Any) -> list[str]:
    """Everything on the data root that came from an upload."""
    return sorted(path.name for folder in (api.layout.uploads, api.layout.files) for path in folder.iterdir())


def boundary_form(parts: list[bytes], boundary: bytes = b"XX") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


def form_part(data: bytes, disposition: str) -> bytes:
    return f"Content-Disposition: form-data; {disposition}\r\n\r\n".encode() + data


@pytest.mark.parametrize("how", ["form", "jsonl", "octet-stream", "chunked"])
def test_an_upload_comes_back_byte_for_byte(api: Any, how: str) -> None:
    data = CHAT * 30_000  # more than one batch
    name = "Übungen 1.jsonl"

    def chunks() -> Iterator[bytes]:
        yield from (data[at : at + 100_003] for at in range(0, len(data), 100_003))

    match how:
        case "form":
            reply = api.http.post("/files", files={"file": (name, data)}, data={"purpose": "fine-tune"})
        case "chunked":
            reply = api.http.post("/files", params={"filename": name}, content=chunks(), headers=JSONL)
        case kind:
            headers = {"content-type": f"application/{kind}"}
            reply = api.http.post("/files", params={"filename": name}, content=data, headers=headers)
    assert reply.status_code == 201, reply.text
    file = reply.json()
    assert file == {
        "id": file["id"],
        "filename": name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "rows": 30_000,
        "format": "messages",
        "report": {
            "container": "jsonl",
            "rows": 30_000,
            "format": "messages",
            "columns": {},
            "ignored_columns": [],
            "fault_count": 0,
            "faults": [],
            "notices": [],
        },
        "created_at": file["created_at"],
        "links": {"self": f"/files/{file['id']}", "content": f"/files/{file['id']}/content"},
    }
    assert api.http.get(file["links"]["self"]).json() == file
    content = api.http.get(file["links"]["content"])
    assert content.content == data
    assert f"filename*=UTF-8''{quote(name)}" in content.headers["content-disposition"]
    part = api.http.get(file["links"]["content"], headers={"range": "bytes=5-9"})
    assert (part.status_code, part.content) == (206, data[5:10])
    stored = api.layout.file(file["id"])
    assert stored.stat().st_mode & 0o777 == 0o600
    assert not list(api.layout.uploads.iterdir())


FAULTY = [
    (b"", "empty_file", None),
    (b"\n\n", "empty_file", None),
    (CHAT * 5 + b'{"messages": [\n' + CHAT * 5, "invalid_json", "line 6"),
    (CHAT + PAIR, "mixed_formats", "line 2"),
    (CHAT + b'{"messages": [{"role": "robot", "content": "x"}]}\n', "unknown_role", "line 2: messages[0].role"),
    (CHAT + b"\xff\xfe\n", "invalid_utf8", "line 2"),
    (b'{"prompt": "a", "completion": ""}\n', "empty", "line 1: completion"),
    (b'{"prompt": "a", "completion": NaN}\n', "invalid_json", "line 1"),
    (b'{"prompt": "a"}\n', "missing_field", "line 1: completion"),
    (b"PK\x03\x04 not text at all\n", "unreadable_file", None),
    (b"not text at all\n", "invalid_json", "line 1"),
    (CHAT + b'{"prompt": "' + b"x" * (17 << 20) + b'"}\n', "too_long", "line 2"),
]


@pytest.mark.parametrize(("data", "code", "field"), FAULTY, ids=[code for _, code, _ in FAULTY])
def test_a_faulty_file_is_refused_by_line_and_field(api: Any, data: bytes, code: str, field: str | None) -> None:
    before = kept(api)
    found = error(api.http.post("/files", files={"file": ("bad.jsonl", data)}), 422)
    assert (found["code"], found["field"]) == ("invalid_data", field)
    assert found["faults"][0]["code"] == code
    assert found["faults"][0]["field"] == field
    assert found["report"]["fault_count"] >= len(found["faults"])
    assert kept(api) == before


PAIRS = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
JUDGED = {"prompt": "2 + 2?", "completion": "4", "label": True}
STEPWISE = {"prompt": "2 + 2?", "completions": ["2 and 2 are 4."], "labels": [True]}


@pytest.mark.parametrize(
    ("good", "bad", "code", "field", "way_out"),
    [
        (PAIRS, {**PAIRS, "rejected": "4"}, "nothing_to_learn", "line 2: rejected", "remove the row"),
        (JUDGED, {**JUDGED, "label": "good"}, "invalid_type", "line 2: label", "JSON boolean"),
        (STEPWISE, {**STEPWISE, "labels": ["+"]}, "invalid_type", "line 2: labels[0]", "JSON boolean"),
        (STEPWISE, {**STEPWISE, "completions": "a\n\nb"}, "invalid_type", "line 2: completions", "split the text"),
        (STEPWISE, {**STEPWISE, "completions": [" "]}, "empty", "line 2: completions[0]", ""),
        (PAIRS, STEPWISE, "mixed_formats", "line 2", ""),
    ],
    ids=["equal answers", "label", "labels of steps", "no separator", "an empty step", "another stage"],
)
def test_rows_that_no_stage_could_learn_from(
    api: Any, good: dict[str, Any], bad: dict[str, Any], code: str, field: str, way_out: str
) -> None:
    data = "".join(json.dumps(row) + "\n" for row in (good, bad, good)).encode()
    declared = {"format": "kto"} if good is JUDGED else None
    found = error(api.http.post("/files", data=declared, files={"file": ("judged.jsonl", data)}), 422)
    (fault, *_) = found["faults"]
    assert (fault["code"], fault["field"], fault["line"]) == (code, field, 2), fault
    assert way_out in fault["message"] and fault["message"] in found["message"], found


def test_labels_of_one_kind_are_told_with_the_file(api: Any) -> None:
    """No error: another file of the job may have the others."""
    data = (json.dumps(JUDGED) + "\n").encode() * 3
    file = api.http.post("/files", data={"format": "kto"}, files={"file": ("judged.jsonl", data)}).json()
    (notice,) = [one for one in file["report"]["notices"] if one["code"] == "one_class"]
    assert "label" in notice["message"]


def test_a_file_of_faults_is_not_read_to_its_end(api: Any) -> None:
    sent = 0

    def rubbish() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(2000):
            sent += 1
            yield b"rubbish\n" * 10_000

    found = error(api.http.post("/files", params={"filename": "x"}, content=rubbish(), headers=JSONL), 422)
    (fault,) = found["faults"]
    assert fault["line"] == 1 and re.fullmatch(r"lines 1 to \d+", fault["field"])
    assert found["report"]["fault_count"] > 50
    assert sent * 80_000 < 80 << 20


def test_a_declared_format_settles_rows_that_fit_two(api: Any) -> None:
    row = b'{"prompt": "a", "completion": "b", "text": "a b"}\n'
    assert error(api.http.post("/files", files={"file": ("a", row)}), 422)["faults"][0]["code"] == "ambiguous_row"
    reply = api.http.post("/files", data={"format": "text"}, files={"file": ("a", row)})
    assert (reply.status_code, reply.json()["format"]) == (201, "text")
    raw = {"filename": "a", "format": "prompt_completion"}
    reply = api.http.post("/files", params=raw, content=row, headers=JSONL)
    assert (reply.status_code, reply.json()["format"]) == (201, "prompt_completion")
    found = error(api.http.post("/files", params={**raw, "format": "txt"}, content=row, headers=JSONL), 422)
    assert "did you mean `text`?" in found["message"]


NAMES = [
    ("../../etc/passwd", "must not contain `/`"),
    ("/etc/passwd", "must not contain `/`"),
    ("a\\b", "must not contain `/`"),
    ("..", "not empty"),
    ("", "not empty"),
    ("a\x00b", "U+0000"),
    ("a\nb", "U+000A"),
    ("a\x1b[31m", "U+001B"),
    ("evil\u202elnosj.exe", "U+202E"),
    ("zero\u200bwidth", "U+200B"),
    ("line\u2028", "U+2028"),
    ("x" * 256, "255 bytes"),
    ("ü" * 128, "255 bytes"),
]


@pytest.mark.parametrize(("name", "words"), NAMES, ids=[repr(name)[:20] for name, _ in NAMES])
def test_names_that_are_more_than_names(api: Any, name: str, words: str) -> None:
    before = kept(api)
    found = error(api.http.post("/files", params={"filename": name}, content=PAIR, headers=JSONL), 422)
    assert found["field"] == "filename"
    assert words in found["message"]
    assert found["message"].isprintable()
    assert kept(api) == before


FORMS: list[tuple[list[bytes], str]] = [
    ([form_part(PAIR, 'name="file"; filename="../../x"')], "must not contain `/`"),
    ([form_part(PAIR, 'name="file"; filename="a%00b"')], ""),
    ([form_part(PAIR, "name=\"file\"; filename*=UTF-8''a%2Fb")], "filename"),
    ([form_part(PAIR, 'name="file"')], "filename"),
    ([form_part(PAIR, 'name="fil"; filename="a"')], "did you mean `file`?"),
    ([form_part(PAIR, 'name="file"; filename="a"')] * 2, "twice"),
    ([form_part(b"fine-tune", 'name="purpose"')], "`file`"),
    ([form_part(b"assistants", 'name="purpose"'), form_part(PAIR, 'name="file"; filename="a"')], "fine-tune"),
    ([form_part(PAIR, 'name="file"; filename="a"'), form_part(b"text", 'name="format"')], "before `file`"),
    ([form_part(b"x" * 2000, 'name="purpose"')], "too long"),
    ([b"X-Long: " + b"x" * 10_000 + b"\r\n\r\n"], "header size"),
    ([b"X: y\r\n" * 1000 + b"\r\n"], "header"),
    ([b"\x00\x01\x02"], "multipart"),
]


@pytest.mark.parametrize(("parts", "words"), FORMS, ids=range(len(FORMS)))
def test_forms(api: Any, parts: list[bytes], words: str) -> None:
    before = kept(api)
    headers = {"content-type": "multipart/form-data; boundary=XX"}
    reply = api.http.post("/files", content=boundary_form(parts), headers=headers)
    if not words:  # a percent sign is a character like any other
        assert reply.json()["filename"] == "a%00b"
        return
    assert words in error(reply, 422)["message"]
    assert kept(api) == before


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("multipart/form-data; boundary=XX", boundary_form([form_part(PAIR, 'name="file"; filename="a"')])[:-6], 422),
        ("multipart/form-data; boundary=XX", b"", 422),
        ("multipart/form-data", PAIR, 422),
        ("multipart/form-data; boundary=" + "y" * 300, PAIR, 422),
        ("application/json", PAIR, 415),
        ("", PAIR, 415),
    ],
)
def test_bodies_that_are_no_upload(api: Any, content_type: str, body: bytes, status: int) -> None:
    before = kept(api)
    error(api.http.post("/files", content=body, headers={"content-type": content_type}), status)
    assert kept(api) == before


def test_limits_announced_unannounced_and_of_the_disk(start_api: Any) -> None:
    with start_api(max_upload_bytes=2 << 20) as api:
        big = PAIR * 60_000
        half = len(big) // 2
        for reply in (
            api.http.post("/files", params={"filename": "a"}, content=big, headers=JSONL),
            api.http.post("/files", params={"filename": "a"}, content=iter([big[:half], big[half:]]), headers=JSONL),
            api.http.post("/files", files={"file": ("a", big)}),
        ):
            found = error(reply, 413)
            assert found["code"] == "too_large"
            assert f"{2 << 20} bytes" in found["message"]
        assert kept(api) == []
        # A real write error in mid-upload: from now on the process may write files of 1 MiB at most.
        resource.prlimit(api.process.pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        found = error(api.http.post("/files", files={"file": ("a", PAIR * 40_000)}), 507)
        assert found["code"] == "no_space"
        assert kept(api) == []
        assert api.http.post("/files", files={"file": ("a", PAIR)}).status_code == 201


def test_a_client_that_leaves_leaves_nothing(api: Any) -> None:
    before = kept(api)
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /files?filename=a HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api.key}\r\n"
        connection.sendall(f"{head}Content-Type: application/jsonl\r\nContent-Length: 10000000\r\n\r\n".encode())
        connection.sendall(PAIR * 60_000)
        _until(lambda: len(kept(api)) == len(before) + 1)
    _until(lambda: kept(api) == before)


def test_stale_parts_are_removed(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    for name, age in (("file-old.part", 90_000), ("file-new.part", 3600), ("other", 90_000)):
        (layout.uploads / name).write_bytes(b"x")
        os.utime(layout.uploads / name, (time.time() - age, time.time() - age))
    app = create_app(Settings(data=tmp_path))

    async def start() -> None:
        async with app.router.lifespan_context(app):
            assert sorted(path.name for path in layout.uploads.iterdir()) == ["file-new.part", "other"]

    asyncio.run(start())


@pytest.mark.both_databases
def test_lists_and_deletion(api: Any) -> None:
    client = api.client("files-list")
    ids = [api.upload(PAIR, f"{number}.jsonl", client=client)["id"] for number in range(3)]
    page = client.get("/files", params={"limit": 2}).json()
    assert [file["id"] for file in page["data"]] == ids[:0:-1]
    assert (page["has_more"], page["next"]) == (True, ids[1])
    rest = client.get("/files", params={"after": page["next"]}).json()
    assert ([file["id"] for file in rest["data"]], rest["has_more"], rest["next"]) == ([ids[0]], False, None)
    assert error(client.get("/files", params={"after": api.upload(PAIR)["id"]}), 400)["code"] == "unknown_cursor"

    same = api.upload(b'{"text": "a file of its own"}\n', client=client)
    mine = client.get("/files", params={"sha256": same["sha256"]}).json()
    assert [file["id"] for file in mine["data"]] == [same["id"]]
    assert len(client.get("/files", params={"sha256": page["data"][0]["sha256"]}).json()["data"]) == 3
    assert client.get("/files", params={"sha256": "0" * 64}).json()["data"] == []
    assert error(client.get("/files", params={"sha256": "xyz"}), 422)["field"] == "sha256"

    job = api.submit(client, data={"train": ids[0], "eval": None})
    held_out = api.upload(b'{"text": "other"}\n', client=client)["id"]
    second = api.submit(client, data={"train": ids[1], "eval": held_out}, stage={"type": "sft", "loss_on": "all"})
    for used in (ids[0], ids[1], held_out):
        found = error(client.delete(f"/files/{used}"), 409)
        assert found["code"] == "file_in_use"
        assert (job["id"] in found["message"]) == (used == ids[0])
    for number in (job["id"], second["id"]):
        client.post(f"/jobs/{number}/cancel")
    reply = client.delete(f"/files/{ids[0]}")
    assert (reply.status_code, reply.json()) == (200, {"id": ids[0], "deleted": True})
    assert not api.layout.file(ids[0]).exists()
    for again in (client.get(f"/files/{ids[0]}"), client.delete(f"/files/{ids[0]}")):
        assert error(again, 404)["code"] == "not_found"
    api.layout.file(ids[2]).unlink()
    assert error(client.get(f"/files/{ids[2]}/content"), 410)["code"] == "gone"


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_rows_are_what_was_sent(api: Any) -> None:
    rows = [{"instruction": "add", "input": "1 2", "output": "3"}, {"instruction": "say hi", "output": "hi"}]
    file = api.upload("\r\n".join(json.dumps(row) for row in rows).encode())
    assert (file["rows"], file["format"]) == (2, "instruction")


def test_a_large_upload_takes_no_memory(api: Any) -> None:
    row = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    data = row * 48_000
    for reply_of in (
        lambda: api.http.post("/files", params={"filename": "a"}, content=data, headers=JSONL),
        lambda: api.http.post("/files", files={"file": ("a", data)}),
    ):
        Path(f"/proc/{api.process.pid}/clear_refs").write_text("5")  # the peak counts from here
        before = status_bytes("VmRSS", api.process.pid) >> 20
        assert reply_of().status_code == 201
        assert (status_bytes("VmHWM", api.process.pid) >> 20) - before < 24, "MiB, for a file of 46"


@pytest.mark.both_databases
def test_deleting_and_submitting_at_once(api: Any) -> None:
    """Either the job has its file, or the file is gone and there is no job; and sharing files is no deadlock."""
    client = api.client("files-race")
    for number in range(6):
        file = api.upload(PAIR, client=client)["id"]
        other = api.upload(b'{"text": "%d"}\n' % number, client=client)["id"]
        loss = {"type": "sft", "loss_on": "all"}
        specs = [
            {"model": "a/b", "data": {"train": file, "eval": other}, "stage": loss},
            {"model": "a/b", "data": {"train": other, "eval": file}, "stage": loss},
        ]
        replies: list[httpx.Response] = []
        barrier = threading.Barrier(5)

        def send(method: str, path: str, body: Any, barrier: threading.Barrier, replies: list[httpx.Response]) -> None:
            with httpx.Client(base_url=api.url, headers=dict(client.headers), timeout=30) as own:
                barrier.wait()
                replies.append(own.request(method, path, json=body))

        calls: list[tuple[str, str, Any]] = [("POST", "/jobs", specs[turn % 2]) for turn in range(4)]
        calls.append(("DELETE", f"/files/{file}", None))
        threads = [threading.Thread(target=send, args=(*call, barrier, replies)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        deleted = [reply.status_code for reply in replies if reply.request.method == "DELETE"]
        posted = {reply.status_code for reply in replies if reply.request.method == "POST"}
        assert (deleted, posted) in (([200], {422}), ([409], {201})), [reply.text for reply in replies]
        assert (client.get(f"/files/{file}").status_code == 404) == (deleted == [200])


def test_other_containers_and_columns_answer_with_a_report(api: Any) -> None:
    table = pa.table({"question": ["a", "b"], "answer": ["c", "d"]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    columns = {"prompt": "question", "completion": "answer"}
    files = {
        "parquet": sink.getvalue().to_pybytes(),
        "csv": b"question,answer\na,c\n=1+1,d\n",
        "json": json.dumps(table.to_pylist()).encode(),
    }
    for container, data in files.items():
        form = {"columns": json.dumps(columns)}
        reply = api.http.post("/files", files={"file": ("rows", data)}, data=form)
        assert reply.status_code == 201, reply.text
        file = reply.json()
        report = file["report"]
        assert (report["container"], report["columns"], file["rows"]) == (container, columns, 2)
        formulas = ["formula"] if container == "csv" else []
        assert [notice["code"] for notice in report["notices"]] == [*formulas, "pairs"]
        job = {"model": "team/tiny", "data": {"train": [file["id"], {"type": "hub", "id": "team/rows"}]}}
        spec = api.http.post("/jobs?dry_run=true", json=job).json()["spec"]
        first, second = (one["source"] for one in spec["data"]["train"]["sources"])
        assert (first["format"], first["columns"]) == ("prompt_completion", columns)
        assert second["type"] == "hub"
    refused = error(api.http.post("/files", files={"file": ("rows", files["parquet"])}), 422)
    assert (refused["faults"][0]["code"], refused["report"]["container"]) == ("unknown_format", "parquet")
    wrong = {"columns": '{"question": "prompt"}'}
    assert error(api.http.post("/files", files={"file": ("rows", b"")}, data=wrong), 422)["field"] == "columns"
    assert not list(api.layout.uploads.iterdir())
