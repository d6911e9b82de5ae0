"""What a job leaves behind: metrics, log, artifacts."""

from __future__ import annotations

import csv
import hashlib
import io
import math
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.jobs.lifecycle.finish import Failed, Requeued, Succeeded

ROW = b'{"prompt": "off", "completion": "lamp.off"}\n'


def metrics(step: int, **values: float) -> dict[str, Any]:
    return {"type": "metrics", "step": step, "values": values}


@pytest.fixture(scope="module")
def run(api: Any) -> tuple[str, Path]:
    """A job whose second claim was handed back at step 3 and whose third one succeeded, with real files."""
    job_id, token = api.start_job(data=api.upload(ROW)["id"])
    api.tell(token, *[metrics(step, loss=9.0, grad_norm=1.0) for step in (1, 2, 3)])
    folder = api.layout.attempt(job_id, token.attempt)
    folder.mkdir(parents=True)
    (folder / "log.txt").write_bytes(b"first\n")
    api.end(token, Requeued("the worker leaves"))
    token = api.go_on(job_id)
    api.tell(token, *[metrics(step, loss=10 - step + 0.5) for step in (3, 4)])
    api.tell(token, {"type": "progress", "step": 4, "total_steps": 4, "epoch": 1.0, "seconds_left": 0})
    folder = api.layout.attempt(job_id, token.attempt)
    inside = folder / "artifacts" / "adapter"
    inside.mkdir(parents=True)
    files = {"adapter/model.safetensors": bytes(range(256)) * 40, "README.md": b"# card\n"}
    for name, content in files.items():
        (folder / "artifacts" / name).write_bytes(content)
    (folder / "log.txt").write_bytes("".join(f"line {n}\n" for n in range(50_000)).encode() + "Größe ".encode()[:3])
    (folder / "secret.txt").write_bytes(b"not listed\n")
    (folder / "artifacts" / "link").symlink_to("/etc/passwd")
    listed = [
        {"path": name, "kind": "adapter", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    ]
    outside = [
        {"path": path, "kind": "x", "bytes": 11, "sha256": "0" * 64}
        for path in ("../secret.txt", "../../../../../etc/passwd", "link", "gone.bin", "/etc/hostname")
    ]
    api.end(token, Succeeded({"steps": 4}, [*listed, *outside]))
    return job_id, folder


@pytest.mark.both_databases
def test_the_latest_attempt_wins_per_step(api: Any, run: tuple[str, Path]) -> None:
    job_id, _ = run
    found = api.http.get(f"/jobs/{job_id}/metrics").json()
    assert found == {"grad_norm": [[1, 1.0], [2, 1.0], [3, 1.0]], "loss": [[1, 9.0], [2, 9.0], [3, 7.5], [4, 6.5]]}
    assert list(api.http.get(f"/jobs/{job_id}/metrics", params={"names": "loss,nope"}).json()) == ["loss"]
    job = api.http.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["result"], job["attempt"]) == ("succeeded", {"steps": 4}, 3)
    assert job["progress"] == {"step": 4, "total_steps": 4, "epoch": 1.0, "seconds_left": 0}


def test_metrics_as_csv(api: Any, run: tuple[str, Path]) -> None:
    for reply in (
        api.http.get(f"/jobs/{run[0]}/metrics", params={"format": "csv"}),
        api.http.get(f"/jobs/{run[0]}/metrics", headers={"accept": "text/csv"}),
    ):
        assert reply.headers["content-type"].startswith("text/csv")
        rows = list(csv.DictReader(io.StringIO(reply.text)))
        assert len(rows) == 7
        assert rows[-1] == {"name": "loss", "step": "4", "value": "6.5"}


@pytest.mark.both_databases
def test_metrics_thinned_out_keep_the_spikes(api: Any) -> None:
    job_id, token = api.start_job(data=api.upload(ROW)["id"])
    loss = {step: 2 + math.sin(step / 50) / 10 for step in range(1, 2001)}
    loss[777], loss[1234] = 50.0, -3.0
    api.tell(token, *[metrics(step, loss=value) for step, value in loss.items()])
    points = api.http.get(f"/jobs/{job_id}/metrics", params={"points": 100}).json()["loss"]
    assert 50 <= len(points) <= 100
    assert points[0] == [1, loss[1]]
    assert points[-1] == [2000, loss[2000]]
    assert [777, 50.0] in points
    assert [1234, -3.0] in points
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    assert len(api.http.get(f"/jobs/{job_id}/metrics", params={"points": 5000}).json()["loss"]) == 2000
    assert api.http.get(f"/jobs/{job_id}/metrics", params={"points": 1}).status_code == 422
    api.end(token, Failed("user", "bad_data", "row 3 has no answer", "data.train"))
    job = api.http.get(f"/jobs/{job_id}").json()
    assert job["failure"] == {
        "class": "user",
        "code": "bad_data",
        "message": "row 3 has no answer",
        "field": "data.train",
    }
    assert api.http.post(f"/jobs/{job_id}/cancel").status_code == 409


def logs(api: Any, run: tuple[str, Path], **params: Any) -> tuple[str, int, httpx.Response]:
    reply = api.http.get(f"/jobs/{run[0]}/logs", params=params)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    return reply.text, int(reply.headers["x-log-offset"]), reply


def test_log_of_the_newest_attempt(api: Any, run: tuple[str, Path]) -> None:
    _, folder = run
    whole = (folder / "log.txt").read_bytes()
    text, offset, reply = logs(api, run)
    # "Größe" was cut inside its ö: that byte waits until the rest of it is there.
    assert text.encode() == whole[:-1]
    assert offset == len(whole) - 1
    assert reply.headers["x-log-attempt"] == "3"
    assert int(reply.headers["x-log-size"]) == len(whole)
    assert logs(api, run, tail=3)[0] == "line 49998\nline 49999\nGr"
    assert logs(api, run, tail=0)[0] == ""
    assert logs(api, run, attempt=2)[0] == "first\n"
    assert logs(api, run, attempt=1)[0] == ""  # preparing wrote no log here
    assert api.http.get(f"/jobs/{run[0]}/logs", params={"attempt": 4}).status_code == 404
    assert api.http.get(f"/jobs/{run[0]}/logs", params={"tail": 1, "offset": 1}).status_code == 422


def test_following_a_log_misses_nothing(api: Any) -> None:
    job_id, token = api.start_job(data=api.upload(ROW)["id"])
    folder = api.layout.attempt(job_id, token.attempt)
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    text, offset, _ = logs(api, (job_id, folder))
    assert (text, offset) == ("", 0)
    parts = [b"eins\nzw", "ei Gr\u00f6".encode()[:-1], b"\xb6\xc3\x9fe ", b"\xff\xfe!\n", b"x" * (5 << 19), b"\nend\n"]
    read = ""
    for part in parts:
        with log.open("ab") as file:
            file.write(part)
        while True:
            text, after, reply = logs(api, (job_id, folder), attempt=2, offset=offset)
            assert len(reply.content) <= 3 << 20
            read += text
            if after == offset:
                break
            offset = after
    assert offset == log.stat().st_size
    assert read == log.read_bytes().decode("utf-8", "replace")
    assert len(logs(api, (job_id, folder))[0]) <= 1 << 20
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert api.http.get(f"/jobs/{job_id}/logs").status_code == 410
    api.end(token, Succeeded({}))


def test_artifacts_are_listed_and_fetched(api: Any, run: tuple[str, Path]) -> None:
    job_id, folder = run
    listed = {item["path"]: item for item in api.http.get(f"/jobs/{job_id}/artifacts").json()["data"]}
    item = listed["adapter/model.safetensors"]
    content = (folder / "artifacts" / item["path"]).read_bytes()
    reply = api.http.get(item["url"])
    assert reply.status_code == 200
    assert reply.content == content
    assert hashlib.sha256(reply.content).hexdigest() == item["sha256"]
    assert reply.headers["etag"] == f'"{item["sha256"]}"'
    assert reply.headers["content-disposition"].startswith('attachment; filename="model.safetensors"')
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert api.http.get(item["url"], headers={"if-none-match": reply.headers["etag"]}).status_code == 304
    head = api.http.head(item["url"])
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(content)), b"")


RANGES = [
    ("bytes=0-0", 206, slice(0, 1)),
    ("bytes=100-199", 206, slice(100, 200)),
    ("bytes=10000-", 206, slice(10000, None)),
    ("bytes=-10", 206, slice(-10, None)),
    ("bytes=-99999", 206, slice(0, None)),
    ("bytes=10000-99999", 206, slice(10000, None)),
    ("bytes=10240-", 416, None),
    ("bytes=-0", 416, None),
    ("bytes=5-2", 200, slice(0, None)),
    ("bytes=0-1,5-6", 200, slice(0, None)),
    ("bytes=-", 200, slice(0, None)),
    ("lines=1-2", 200, slice(0, None)),
]


@pytest.mark.parametrize(("header", "status", "part"), RANGES)
def test_ranges(api: Any, run: tuple[str, Path], header: str, status: int, part: slice | None) -> None:
    job_id, folder = run
    content = (folder / "artifacts/adapter/model.safetensors").read_bytes()
    reply = api.http.get(f"/jobs/{job_id}/artifacts/adapter/model.safetensors", headers={"range": header})
    assert reply.status_code == status
    if part is None:
        assert reply.json()["error"]["code"] == "range_not_satisfiable"
        return
    assert reply.content == content[part]
    if status == 206:
        start, stop, _ = part.indices(len(content))
        assert reply.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(content)}"


def test_if_range_protects_a_resumed_download(api: Any, run: tuple[str, Path]) -> None:
    url = f"/jobs/{run[0]}/artifacts/README.md"
    same = api.http.get(url).headers["etag"]
    assert api.http.get(url, headers={"range": "bytes=2-", "if-range": same}).content == b"card\n"
    assert api.http.get(url, headers={"range": "bytes=2-", "if-range": '"other"'}).content == b"# card\n"


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "%2e%2e/secret.txt",
        "..%2fsecret.txt",
        "../../../../../etc/passwd",
        "..%2f..%2f..%2f..%2f..%2fetc%2fpasswd",
        "%2fetc%2fhostname",
        "link",
        "secret.txt",
        "adapter",
        "adapter/",
        "",
        "a%00b",
        "%ff",
        "gone.bin",
    ],
)
def test_nothing_else_is_served(api: Any, run: tuple[str, Path], path: str) -> None:
    """Some of these are even listed: a child process wrote the list, so it is not believed."""
    url = httpx.URL(api.url).copy_with(raw_path=f"/jobs/{run[0]}/artifacts/{path}".encode())
    reply = httpx.get(url, headers=dict(api.http.headers))
    assert reply.status_code == (410 if path == "gone.bin" else 404), reply.text
    assert reply.json()["error"]["code"] == ("gone" if path == "gone.bin" else "not_found")


def test_a_damaged_artifact_is_not_passed_off(api: Any) -> None:
    job_id, token = api.start_job(data=api.upload(ROW)["id"])
    folder = api.layout.artifacts(job_id, token.attempt)
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"short")
    artifact = {"path": "a.bin", "kind": "x", "bytes": 11, "sha256": "0" * 64}
    api.end(token, Succeeded({}, [artifact]))
    reply = api.http.get(f"/jobs/{job_id}/artifacts/a.bin")
    assert (reply.status_code, reply.json()["error"]["code"]) == (410, "gone")


@pytest.mark.both_databases
def test_the_trace_has_the_spans_that_the_events_tell(api: Any) -> None:
    job_id, token = api.start_job(data=api.upload(ROW)["id"])
    told = [{"type": "phase", "phase": name} for name in ("loading", "training")]
    api.tell(
        token, *told, *[metrics(step, loss=9.0) for step in (1, 2)], {"type": "checkpoint", "step": 2, "path": "x"}
    )
    api.end(token, Requeued("the worker leaves"))
    token = api.go_on(job_id)
    api.tell(token, told[1], metrics(3, loss=8.0), {"type": "phase", "phase": "saving"})
    running = api.http.get(f"/jobs/{job_id}/trace").json()
    assert [one["name"] for one in running["traceEvents"] if one.get("cat") == "status"][-1] == "running"
    api.end(token, Succeeded({"steps": 3}, []))
    found = api.http.get(f"/jobs/{job_id}/trace").json()
    events = api.http.get(f"/jobs/{job_id}/events", params={"format": "json"}).json()["data"]
    tracks: dict[str, list[dict[str, Any]]] = {}
    for one in found["traceEvents"]:
        if one["ph"] != "M":
            tracks.setdefault(one["cat"], []).append(one)
    began = found["otherData"]["began"]
    told_at = {one["seq"]: datetime.fromisoformat(one["time"]).timestamp() - began for one in events}
    for one in (*tracks["status"], *tracks["phases"], *tracks["events"]):
        if "seq" in one["args"]:
            assert one["ts"] / 1e6 == pytest.approx(told_at[one["args"]["seq"]], abs=1e-5)
    statuses = [one["data"]["to"] for one in events if one["type"] == "status"]
    assert [one["name"] for one in tracks["status"]][-len(statuses) + 1 :] == statuses[:-1]
    phases = [one["data"]["phase"] for one in events if one["type"] == "phase"]
    assert [one["name"] for one in tracks["phases"]] == phases == ["loading", "training", "training", "saving"]
    assert [one["args"]["step"] for one in tracks["steps"]] == [1, 2, 3]
    first, second, third = tracks["steps"]
    assert (first["ts"], third["ts"]) == (tracks["phases"][1]["ts"], tracks["phases"][2]["ts"])
    assert second["ts"] == first["ts"] + first["dur"]
    assert [one["name"] for one in tracks["events"]] == ["checkpoint"]
    assert [one["args"]["attempt"] for one in tracks["attempts"]] == sorted({one["attempt"] for one in events} - {0})
    for name in ("status", "phases", "steps", "attempts"):
        spans = tracks[name]
        assert all(one["dur"] >= 0 for one in spans)
        assert all(one["ts"] + one["dur"] <= after["ts"] for one, after in pairwise(spans)), name
    last = tracks["status"][-1]
    assert events[-1]["data"]["to"] == "succeeded" and last["name"] == "running"
    assert (last["ts"] + last["dur"]) / 1e6 == pytest.approx(told_at[events[-1]["seq"]], abs=0.1)
