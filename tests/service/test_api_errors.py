"""One error shape, a request id everywhere, keys, and other people's things that do not exist."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.auth import families, keys
from api.auth import service as auth
from api.auth.service import PATTERN
from core.db.engine import Database
from core.db.migrate import head, upgrade
from core.jobs.lifecycle.finish import Failed
from core.settings import Settings
from tests.support import forks

PAIR = b'{"prompt": "off", "completion": "lamp.off"}\n'
OPEN = ("/healthz", "/readyz", "/version", "/openapi.json", "/docs")


def shape(reply: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a reply, which has the one shape."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert list(reply.json()) == ["error"]
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) - {"faults"} == {"code", "message", "field", "request_id"}
    for fault in error.get("faults", []):
        assert set(fault) == {"code", "message", "field"}
    assert error["request_id"] == reply.headers["x-request-id"]
    return error


def test_every_kind_of_error_has_the_one_shape(api: Any) -> None:
    http = api.http
    assert shape(http.get("/nope"), 404)["code"] == "not_found"
    assert shape(http.get("/%00%1b[31m"), 404)["message"].isprintable()
    wrong_method = http.put("/jobs")
    assert shape(wrong_method, 405)["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "GET, POST"
    assert shape(http.get("/jobs", params={"limit": "many"}), 422)["field"] == "limit"
    assert shape(http.get("/jobs/job-nope"), 404)["field"] == "job_id"
    assert shape(http.post("/jobs", content=b"{}", headers={"content-type": "x/y"}), 415)["field"] == "content-type"
    assert shape(http.post("/jobs", json={}), 422)["code"] == "invalid_spec"
    assert shape(http.get("/jobs", headers={"authorization": ""}), 401)["code"] == "missing_api_key"
    for path, name in (("/jobs?stauts=failed", "`status`"), ("/version?x=1", "has none")):
        error = shape(http.get(path), 422)
        assert error["code"] == "unknown_parameter"
        assert name in error["message"]
    misspelt = shape(http.post("/jobs?dryrun=true", json={"model": "a/b", "data": "x"}), 422)
    assert (misspelt["field"], "did you mean `dry_run`?" in misspelt["message"]) == ("dryrun", True)


def logged(api: Any, words: str) -> None:
    """The line comes behind the answer."""
    deadline = time.monotonic() + 90
    while words not in api.log():
        assert time.monotonic() < deadline, api.log()
        time.sleep(0.02)


def test_request_ids(api: Any) -> None:
    given = api.http.get("/version", headers={"x-request-id": "trace.42:A_b-c"})
    assert given.headers["x-client-request-id"] == "trace.42:A_b-c", "theirs, beside ours"
    assert re.fullmatch(r"req-[0-9a-f]{24}", given.headers["x-request-id"])
    logged(api, f"[{given.headers['x-request-id']}] GET /version 200")
    logged(api, " as trace.42:A_b-c")
    made = {api.http.get("/version").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    for bad in ("a b", "x" * 65, "a,b", "<i>"):
        reply = api.http.get("/version", headers={"x-request-id": bad})
        assert re.fullmatch(r"req-[0-9a-f]{24}", reply.headers["x-request-id"])
    api.http.get("/nope%0aFAKE%20LOG%20LINE")
    logged(api, "GET /nope%0aFAKE%20LOG%20LINE 404")
    assert "\nFAKE" not in api.log()


def test_a_defect_says_nothing_but_its_id(start_api: Any) -> None:
    """A real one: a folder of the data root is gone. The user gets an id, the log has the traceback under it."""
    with start_api() as api:
        api.layout.uploads.rmdir()
        reply = api.http.post("/files", files={"file": ("a", PAIR)})
        error = shape(reply, 500)
        assert error["code"] == "internal"
        assert str(api.root) not in reply.text
        log = api.log()
        line = next(line for line in log.splitlines() if error["request_id"] in line and "ERROR" in line)
        assert "POST /files failed" in line
        assert "FileNotFoundError" in log


async def ask(app: FastAPI, path: str, **headers: str) -> httpx.Response:
    """In this process, where no other one is needed."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as client:
        return await client.get(path, headers=headers)


def test_without_its_database_the_api_says_so(start_api: Any, tmp_path: Path) -> None:
    settings = Settings(data=tmp_path, database_url="postgresql+psycopg://nobody@127.0.0.1:1/none")
    app = create_app(settings)
    reply = asyncio.run(ask(app, "/jobs", authorization="Bearer eft_" + "a" * 8 + "_" + "b" * 40))
    assert shape(reply, 503)["code"] == "unavailable"
    assert asyncio.run(ask(app, "/readyz")).json()["checks"]["database"]["ok"] is False
    with start_api(migrate=False) as api:
        assert httpx.get(f"{api.url}/healthz").status_code == 200
        reply = httpx.get(f"{api.url}/jobs", headers={"authorization": "Bearer eft_" + "a" * 8 + "_" + "b" * 40})
        error = shape(reply, 503)
        assert error["code"] == "unavailable"
        assert reply.headers["retry-after"] == "2"
        assert "sqlite" not in reply.text.lower()
        assert "no such table: api_keys" in api.log()
        assert "WARNING eft.api [-] schema: is missing" in api.log()
        ready = httpx.get(f"{api.url}/readyz")
        assert ready.status_code == 503
        assert ready.json()["checks"]["schema"] == {
            "ok": False,
            "detail": f"is missing, this version needs {head()}: run `eft migrate`",
        }


def test_wrong_keys(api: Any) -> None:
    good = api.key
    prefix = good.split("_")[1]
    wrong = [
        "nonsense",
        "eft_",
        f"eft_{prefix}_" + "0" * 40,
        good[:-1],
        good + "0",
        good.upper(),
        f"eft_{'0' * 8}_{good[13:]}",
        good.replace("eft_", "sk-"),
    ]
    answers = set()
    for key in wrong:
        reply = api.with_key(key).get("/jobs")
        assert reply.headers["www-authenticate"] == "Bearer"
        error = shape(reply, 401)
        answers.add((error["code"], error["message"]))
    assert len(answers) == 1  # nothing tells a wrong prefix from a wrong secret
    for header in (f"Basic {good}", good, "Bearer", "Bearer "):
        shape(httpx.get(f"{api.url}/jobs", headers={"authorization": header.strip()}), 401)
    for path in OPEN:
        reply = httpx.get(f"{api.url}{path}")
        assert reply.status_code in (200, 503), path


@pytest.mark.both_databases
def test_a_revoked_key_stops_at_once(api: Any) -> None:
    client = api.client("revoked")
    assert client.get("/jobs").status_code == 200
    prefix = client.headers["authorization"].split("_")[1]
    with api.database.write() as session:
        key_id = auth.by_prefix(session, prefix)
        assert key_id is not None and families.end(session, None, key_id) == []
        assert auth.by_prefix(session, prefix) is None
    shape(client.get("/jobs"), 401)


@pytest.mark.both_databases
def test_pause_resume_retry(api: Any) -> None:
    job = api.submit(data=api.upload(PAIR)["id"])

    def ask(what: str, number: str = "") -> httpx.Response:
        reply: httpx.Response = api.http.post(f"/jobs/{number or job['id']}/{what}")
        return reply

    assert [ask("pause").json()["status"] for _ in range(2)] == ["paused", "paused"]
    assert shape(ask("retry"), 409)["code"] == "not_ended"
    assert ask("resume").json()["status"] == "queued"
    assert ask("cancel").json()["status"] == "cancelled"
    assert shape(ask("pause"), 409)["code"] == "not_pausable"
    assert shape(ask("resume"), 409)["code"] == "not_paused"
    first, second = ask("retry").json(), ask("retry").json()
    assert first["id"] == second["id"] != job["id"]
    assert (first["retry_of"], first["status"], first["spec"]) == (job["id"], "queued", job["spec"])

    failed, token = api.start_job(data=api.upload(PAIR)["id"])
    api.end(token, Failed("machine", "lost", "gone", None))
    with api.database.write() as session:  # the retries of machine faults are another's test
        from core.jobs.lifecycle.submit import cancel, find

        actor = _owner(session, failed)
        if find(session, actor, failed).status == "queued":
            cancel(session, actor, failed)
    file = api.http.get(f"/jobs/{failed}").json()["spec"]["data"]["train"]["id"]
    assert api.http.delete(f"/files/{file}").status_code == 200
    assert shape(ask("retry", failed), 422)["code"] == "file_not_found"


def _owner(session: Any, job_id: str) -> Any:
    from core.db.tables import Job
    from core.jobs.lifecycle.submit import Actor

    job = session.get(Job, job_id)
    return Actor(job.owner_id, job.project_id)


def test_the_key_command(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'eft.db'}"

    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    environment |= {"EFT_DATA": str(tmp_path), "EFT_DATABASE_URL": url}

    def run(*arguments: str) -> tuple[int, str]:
        """Exit status, and what it printed. That the command starts cold is for tests/service/test_entry_points.py."""
        with (tmp_path / "said").open("w+b") as said:
            code = forks.start("api.auth.keys", *arguments, environment=environment, log=said.fileno()).wait()
            return code, (tmp_path / "said").read_text()

    code, words = run("list")
    assert code == 1 and "core.db.migrate" in words
    database = Database(url)
    upgrade(database)
    kept = tmp_path / "keys" / "first"
    key = run("create", "--project", "lab", "--user", "ada", "--if-none", str(kept))[1].strip()
    assert re.fullmatch(PATTERN, key)
    assert kept.read_text() == key + "\n"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    second = tmp_path / "second"
    assert keys.create(database, project="lab", user="ada", name="again", if_none=second) is None
    assert not second.exists()
    assert keys.create(database, project="lab", user="grace", name="ci") is not None
    with database.read() as session:
        owner = auth.authenticate(session, key)
        assert owner is not None
        listed = auth.listing(session)
        assert [(user, project) for _, user, project in listed] == [("ada", "lab"), ("grace", "lab")]
        assert {row.project_id for row, _, _ in listed} == {owner.project_id}
        assert all(key not in str(vars(row)) for row, _, _ in listed)
    assert run("revoke", key.split("_")[1])[0] == 0
    with database.read() as session:
        assert auth.authenticate(session, key) is None
    columns = run("list")[1].splitlines()[0].split()
    assert (columns[0], columns[3]) == (key.split("_")[1], "revoked")
    with pytest.raises(SystemExit):
        keys.main(["create", "--project", "a\nb", "--user", "ada"])
    database.dispose()


@pytest.mark.parametrize("path", ["/jobs", "/files?filename=a"])
def test_a_refusal_in_mid_upload_reaches_a_client_that_only_writes(api: Any, path: str) -> None:
    """httpx sends the whole body before it looks: 12 MiB without a key must end in a 401, not in a broken pipe."""
    body = b"x" * (12 << 20)
    headers = {"content-type": "application/jsonl"}
    reply = httpx.post(f"{api.url}{path}", content=body, headers=headers)
    shape(reply, 401)
