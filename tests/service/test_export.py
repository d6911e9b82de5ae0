"""The export of a project: all of it, nothing of anybody else's, no secret, and never more than blocks in memory."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tracemalloc
from typing import Any

import pytest
from sqlalchemy import insert, update

from api.auth.policy import Role, Scope
from api.export.contents import TABLES, Exporter
from core.db.tables import ApiKey, Base, File, Metric, Webhook
from core.ids import new_id
from core.storage.store import Folder
from tests.support.world import Project, World


def exporter(here: World, project: Project, *, checkpoints: bool = False) -> Exporter:
    return Exporter(here.database, here.layout, Folder(here.layout.root), project.id, checkpoints)


def opened(data: bytes, project: Project) -> dict[str, bytes]:
    """Name below the top folder → content; every one is held against the manifest."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            top, _, name = member.name.partition("/")
            assert top == f"eft-{project.id}" and member.isreg() and name not in found
            file = archive.extractfile(member)
            assert file is not None
            found[name] = file.read()
    lines = rows(found["MANIFEST.jsonl"])
    last = lines.pop()
    assert last["complete"] is True and last["files"] == len(found) - 1
    told = {line["path"]: line for line in lines}
    for name, content in found.items():
        if name != "MANIFEST.jsonl":
            assert told[name]["bytes"] == len(content)
            assert told[name]["sha256"] == hashlib.sha256(content).hexdigest()
    return found


def rows(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


@pytest.mark.both_databases
def test_an_admin_gets_all_of_the_project_and_nothing_else(here: World) -> None:
    boss = here.caller("boss", Role.ADMIN, Scope.ADMIN)
    here.webhook(here.lab)
    here.webhook(here.rivals)
    session_id = here.session(here.lab, fresh=True)
    with here.database.write() as session:
        session.execute(update(Webhook).values(secrets=[{"secret": "whsec_hunter2", "until": None}]))
        session.execute(update(Webhook).values(url="https://hooks.example.org/services/hunter2"))
        owner = {"owner_id": here.lab.owner.user_id, "project_id": here.lab.id}
        values = {"job_id": here.lab.job, "name": "loss", "attempt": 2, "value": 0.5, "time": 1.0}
        more_than_one_block = [{"step": step, **values, **owner} for step in range(3000)]
        session.execute(insert(Metric), more_than_one_block)
        hashes = [row for (row,) in session.query(ApiKey.sha256)]
    checkpoint = here.layout.attempt(here.lab.job, 2) / "checkpoints" / "step-00000001" / "state.bin"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"state")
    here.layout.file(here.lab.file).write_bytes(b"x" * 10)
    with here.database.write() as session:
        session.execute(update(File).where(File.id == here.lab.file).values(bytes=10))

    reply = here.ask("GET", f"/projects/{here.lab.name}/export", boss.key)
    assert reply.status_code == 200 and reply.headers["content-type"] == "application/x-tar"
    assert 'filename="lab.tar"' in reply.headers["content-disposition"]
    found = opened(reply.content, here.lab)
    job = f"jobs/{here.lab.job}"
    assert {f"{name}.jsonl" for name in TABLES} | {"project.json", "README.txt", "limits.json"} <= set(found)
    assert found[f"{job}/attempt-2/artifacts/a.bin"] == found[f"{job}/attempt-2/log.txt"] == b"mine"
    assert found[f"files/{here.lab.file}"] == b"x" * 10
    assert [row["to"] for row in (line["data"] for line in rows(found[f"{job}/events.jsonl"])) if "to" in row][-1] == (
        "succeeded"
    )
    assert [line["step"] for line in rows(found[f"{job}/metrics.jsonl"])] == list(range(3000))
    (told,) = [row for row in rows(found["jobs.jsonl"]) if row["id"] == here.lab.job]
    assert told["spec"]["name"] == "same name" and told["status"] == "succeeded"
    assert [row["id"] for row in rows(found["pipelines.jsonl"])] == [here.lab.pipeline]
    steps = rows(found["pipeline_steps.jsonl"])
    assert {row["pipeline_id"] for row in steps} == {here.lab.pipeline} and steps[0]["spec"]
    assert {row["pipeline_id"] for row in rows(found["pipeline_events.jsonl"])} == {here.lab.pipeline}
    (operation,) = [row for row in rows(found["session_operations.jsonl"]) if row["session_id"] == session_id]
    assert operation["tensors"] == "/wA=", "bytes in base64"
    assert not [name for name in found if "checkpoints" in name]
    assert {user["name"] for user in json.loads(found["project.json"])["users"]} >= {"boss", "owner of lab"}
    assert [row["origin"] for row in rows(found["webhooks.jsonl"])] == ["https://hooks.example.org"]
    assert "project.export" in {row["action"] for row in rows(found["audit.jsonl"])}

    for secret in ("hunter2", *here.secrets, *hashes):
        assert secret.encode() not in reply.content
    rivals = here.rivals
    ids = (rivals.id, rivals.pipeline, rivals.job, rivals.file, rivals.preview, rivals.owner.user_id)
    for theirs in (*ids, "owner of rivals"):
        assert theirs.encode() not in reply.content, theirs

    more = here.ask("GET", f"/projects/{here.lab.id}/export", boss.key, params={"checkpoints": "true"})
    assert opened(more.content, here.lab)[f"{job}/attempt-2/checkpoints/step-00000001/state.bin"] == b"state"


def test_no_table_of_a_project_is_forgotten() -> None:
    elsewhere = {"events", "metrics"}  # a file of each job
    no_record = {"deleted_jobs", "idempotency_keys", "completions"}  # requests go with their answers
    owned = {name for name, table in Base.metadata.tables.items() if "project_id" in table.columns}
    assert owned == set(TABLES) | elsewhere | no_record


def test_nobody_else_gets_it(here: World) -> None:
    theirs = here.caller("their boss", Role.ADMIN, Scope.ADMIN, project=here.rivals.id)
    for caller, status in (
        (here.caller("member", Role.MEMBER, Scope.WRITE), 403),
        (here.caller("timid boss", Role.ADMIN, Scope.WRITE), 403),
        (here.caller("root of the box", None, Scope.BOX, box_admin=True), 403),
        (theirs, 404),
    ):
        reply = here.ask("GET", f"/projects/{here.lab.name}/export", caller.key)
        assert reply.status_code == status, (caller.name, reply.text)
    both = here.caller("boss of the box", Role.ADMIN, Scope.BOX, box_admin=True)
    assert here.ask("GET", f"/projects/{here.rivals.id}/export", both.key).status_code == 404, "not with any key"


def test_memory_stays_small_and_what_is_gone_is_told(here: World) -> None:
    big, gone = new_id("file"), new_id("file")
    with here.database.write() as session:
        for file_id in (big, gone):
            ids = {"id": file_id, "owner_id": here.rivals.owner.user_id, "project_id": here.rivals.id}
            values = {"filename": "big", "bytes": 64 << 20, "sha256": "0" * 64, "rows": 1, "format": "text"}
            session.execute(insert(File).values(**ids, **values))
    with here.layout.file(big).open("wb") as file:
        file.truncate(64 << 20)
    log = here.layout.attempt(here.rivals.job, 2) / "log.txt"
    log.write_bytes(b"first\n")
    older = log.parent.with_name("attempt-1") / "log.txt"
    older.parent.mkdir(exist_ok=True)
    with older.open("wb") as file:
        file.truncate(64 << 20)  # of a log beyond its bound the oldest part is a hole
        file.seek(64 << 20)
        file.write(b"the newest part\n" * 1000)
    outside = here.layout.root.parent / "outside"
    outside.write_text("somebody else's")
    (log.parent / "artifacts").mkdir(exist_ok=True)
    (log.parent / "artifacts" / "link").symlink_to(outside)
    os.mkfifo(log.parent / "artifacts" / "pipe")
    digest, size, manifest = hashlib.sha256(), 0, b""
    tracemalloc.start()
    for block in exporter(here, here.rivals).stream():
        size += len(block)
        digest.update(block)
        manifest = (manifest + block)[-100_000:]
        with log.open("ab") as file:
            file.write(b"more\n" if file.tell() < 1000 else b"")  # its job goes on
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 64 << 20 < size < 66 << 20 and size % 512 == 0
    assert peak < 8 << 20, f"{peak >> 20} MiB"
    assert f'{{"path": "files/{gone}", "missing": "gone"}}'.encode() in manifest
    for name in ("link", "pipe"):
        path = f"jobs/{here.rivals.job}/attempt-2/artifacts/{name}"
        assert f'{{"path": "{path}", "missing": "not what was stored"}}'.encode() in manifest
    assert b'"complete": true' in manifest
    assert not list(here.layout.uploads.iterdir()), "nothing is left lying about"
