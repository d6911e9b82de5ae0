"""`DELETE /jobs/{id}` and `eft delete`: disk, answers and audit. Rows and bounds: tests/db/test_deletion.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.jobs.lifecycle.finish import Failed, Succeeded
from tests.support.client import eft

FILES = {
    "attempt-2/checkpoints/step-4/state.bin": 5000,
    "attempt-2/artifacts/a.bin": 300,
    "attempt-2/log.txt": 20,
    "attempt-1/log.txt": 1,
}
SIZES = {"checkpoints": 5000, "artifacts": 300, "other": 21}


def ended(api: Any, outcome: Any = None, **spec: Any) -> tuple[str, Path]:
    artifact = {"path": "a.bin", "kind": "x", "bytes": 300, "sha256": "0" * 64}
    job_id, token = api.start_job(**spec)
    for name, size in FILES.items():
        path = api.layout.job(job_id) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    api.end(token, outcome or Succeeded({}, [artifact]))
    return job_id, api.layout.job(job_id)


@pytest.mark.both_databases
def test_it_is_gone_and_says_what_that_freed(api: Any) -> None:
    job_id, folder = ended(api)
    running, token = api.start_job()
    reply = api.http.delete(f"/jobs/{running}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "not_ended")
    asked = api.http.delete(f"/jobs/{running}", params={"dry_run": True})
    assert [one["code"] for one in asked.json()["obstacles"]] == ["not_ended"] and asked.status_code == 200
    api.end(token, Failed("user", "x", "y"))

    goes = {"id": job_id, "name": None, "freed_bytes": SIZES, "model": None, "exports": [], "obstacles": []}
    assert api.http.delete(f"/jobs/{job_id}", params={"dry_run": True}).json() == goes | {"deleted": False}
    assert folder.exists() and api.http.get(f"/jobs/{job_id}").status_code == 200
    reply = api.http.delete(f"/jobs/{job_id}")
    assert reply.json() == goes | {"deleted": True}
    assert not folder.exists() and not list(folder.parent.glob(".gone-*"))
    for path in ("", "/events", "/metrics", "/logs", "/artifacts", "/artifacts/a.bin"):
        assert api.http.get(f"/jobs/{job_id}{path}").status_code == 404, path
    assert job_id not in api.http.get("/jobs", params={"limit": 200}).text
    again = api.http.delete(f"/jobs/{job_id}")
    assert again.json() == goes | {"deleted": True, "freed_bytes": dict.fromkeys(SIZES, 0)}
    assert api.client("strangers").delete(f"/jobs/{job_id}").status_code == 404


@pytest.mark.both_databases
def test_a_key_that_made_a_deleted_job(api: Any) -> None:
    """It neither brings the job back nor makes another one."""
    body = {"model": "team/tiny", "data": api.upload(b'{"text": "a"}\n')["id"]}
    job_id = api.http.post("/jobs", json=body, headers={"idempotency-key": "deleted"}).json()["id"]
    api.http.post(f"/jobs/{job_id}/cancel")
    assert api.http.delete(f"/jobs/{job_id}").status_code == 200
    reply = api.http.post("/jobs", json=body, headers={"idempotency-key": "deleted"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (410, "gone")
    assert job_id in reply.json()["error"]["message"]


def test_from_the_command_line(api: Any) -> None:
    """A retry goes before what it is a retry of, however they are named. Nothing goes before somebody has said yes, and
    nothing at all while something needs one of the jobs."""
    first, folder = ended(api, Failed("user", "x", "y"))
    second = api.http.post(f"/jobs/{first}/retry").json()["id"]
    refused = eft(api, "delete", first, second, "--yes")
    assert refused.returncode == 2 and "is queued; only an ended job can be deleted" in refused.stderr
    alone = eft(api, "delete", first, "--yes")
    assert alone.returncode == 2 and f"`{second}` may continue from checkpoints of this job" in alone.stderr
    api.http.post(f"/jobs/{second}/cancel")
    unasked = eft(api, "delete", first, second)
    assert unasked.returncode == 2 and "--yes deletes without asking" in unasked.stderr
    assert f"{first}: 5.3 kB would be freed (checkpoints 5.0 kB, artifacts 300 B)" in unasked.stderr
    shown = eft(api, "delete", first, second, "--dry-run", "--json")
    assert [json.loads(line)["deleted"] for line in shown.stdout.splitlines()] == [False, False], shown.stderr
    assert folder.exists(), "nothing of that has deleted anything"
    done = eft(api, "delete", first, second, "--yes")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{second} deleted: it has left nothing on the disk",
        f"{first} deleted: 5.3 kB freed (checkpoints 5.0 kB, artifacts 300 B)",
    ]
