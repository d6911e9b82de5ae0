"""The queue, GPUs, holds, maintenance, usage and quotas over HTTP and by the `eft` command."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from eft.times import point
from sqlalchemy import delete, update

from api.jobs import schemas as jobs_schemas
from api.queue import gpu_schemas, schemas
from core.db.engine import db_now
from core.db.tables import Allocation, Hold, Job, Limit, Maintenance, Node, UsageDay, UsageTotal
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Slot
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.policies import nodes, usage
from tests.support.client import eft
from tests.support.lab import gpu

PREPARE = {"id": "prepare-0", "kind": "prepare"}


@pytest.fixture
def box(api: Any) -> Iterator[str]:
    """A node `qbox` with two GPUs, one of them used by somebody; nothing waits, nobody has a quota."""

    def clear() -> None:
        with api.database.write() as session:
            for table in (Hold, Maintenance, Limit, UsageTotal, UsageDay):
                session.execute(delete(table))
            session.execute(update(Allocation).values(charged_at=db_now()))
            session.execute(update(Job).where(Job.status == "queued").values(status="cancelled"))
            session.execute(update(Node).values(heartbeat_at=db_now() - 3600))

    clear()
    process = {"pid": 4711, "user": "bob", "name": "python", "bytes": 1 << 30}
    with api.database.write() as session:
        slots = [gpu(0, live={"busy_percent": 3, "used_bytes": 7}), {**gpu(1), "processes": [process]}, PREPARE]
        nodes.register(session, "qbox", "worker-of-qbox", "0.1.0", slots, [], ["fast"])
    yield "qbox"
    clear()


def ready(api: Any, client: Any = None, **spec: Any) -> str:
    """A job that waits for a GPU with its model there."""
    job_id: str = api.submit(client, **spec)["id"]
    with api.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(prepared={"model_dir": "m"}))
    return job_id


def test_a_job_and_the_queue_say_the_same(api: Any, box: str) -> None:
    first = ready(api, priority=3)
    job_id = ready(api, resources={"requirements": {"bf16": True, "labels": ["fast"]}})
    job = api.http.get(f"/jobs/{job_id}").json()
    assert job["priority"] == 0 and job["queue"]["position"] == 2
    assert job["queue"]["reason"] == (
        "2nd in line; 1 of 2 free (qbox/1 used by bob, outside eft (pid 4711, python)); "
        "needs 1 slot with bf16 and label fast"
    )
    schemas.PlaceView.model_validate(job["queue"], extra="forbid")
    listed = api.http.get("/queue").json()
    schemas.QueueView.model_validate(listed, extra="forbid")
    assert [(row["job"], row["position"], row["owner"]) for row in listed["data"]] == [
        (first, 1, "ada"),
        (job_id, 2, "ada"),
    ]
    assert listed["data"][1]["reason"] == job["queue"]["reason"]
    theirs = api.client("another-lab", "cyd").get("/queue").json()["data"]
    assert [(row["job"], row["owner"], row["project"], row["name"]) for row in theirs] == [(None,) * 4] * 2
    assert [row["position"] for row in theirs] == [1, 2]
    shown = eft(api, "queue")
    assert first in shown.stdout and "2nd in line" in shown.stdout.replace("\n", " "), shown.stderr
    assert (listed["more"], "more wait" in shown.stderr) == (0, False)
    cut = api.http.get("/queue?limit=1").json()
    assert ([row["job"] for row in cut["data"]], cut["more"]) == ([first], 1)
    assert "1 more waits: --limit" in eft(api, "queue", "--limit", "1").stderr
    by_command = json.loads(eft(api, "queue", "--json").stdout)["data"]
    assert [{**row, "estimated_start": None} for row in by_command] == [
        {**row, "estimated_start": None} for row in listed["data"]
    ]
    assert "in line" in eft(api, "show", job_id).stdout
    for path in ("/jobs", "/jobs?dry_run=true"):
        refused = api.http.post(path, json={"model": "a/b", "data": job["spec"]["data"], "priority": 11})
        assert (refused.status_code, refused.json()["error"]["faults"][0]["code"]) == (422, "priority_too_high")
    many = api.http.post("/jobs", json={"model": "a/b", "data": job["spec"]["data"], "resources": {"gpus": 4}})
    assert many.status_code == 201
    told = api.http.get(f"/jobs/{many.json()['id']}").json()["queue"]
    assert told["code"] == "requirements" and "needs 4 slots" in told["reason"], told
    assert told["reason"].endswith("its model is prepared meanwhile")


def _events(api: Any, job_id: str) -> list[dict[str, Any]]:
    return list(api.http.get(f"/jobs/{job_id}/events", params={"format": "json"}).json()["data"])


def test_another_priority_is_another_place(api: Any, box: str) -> None:
    first, second, third = (ready(api) for _ in range(3))

    def line() -> list[str]:
        return [row["job"] for row in api.http.get("/queue").json()["data"]]

    assert line() == [first, second, third]
    done = eft(api, "priority", third, "--to", "5")
    assert done.stdout == f"{third} queued, priority 5\n", done.stderr
    assert line() == [third, first, second]
    shown = api.http.patch(f"/jobs/{first}", json={"priority": -5})
    assert (shown.status_code, shown.json()["priority"], shown.json()["spec"]["priority"]) == (200, -5, 0)
    assert line() == [third, second, first]
    wrong = ((11, 422, "priority_too_high"), (101, 422, "invalid_value"), (None, 422, "invalid_value"))
    for priority, status, code in wrong:
        refused = api.http.patch(f"/jobs/{second}", json={"priority": priority})
        assert (refused.status_code, refused.json()["error"]["faults"][0]["code"]) == (status, code)
    api.http.patch(f"/jobs/{third}", json={"priority": 5})  # as it is: nothing more is told
    told = [event for event in _events(api, third) if event["type"] == "priority"]
    assert [(event["data"]["from"], event["data"]["to"]) for event in told] == [(0, 5)]
    audited = api.http.get(f"/audit?action=job.priority&target={third}").json()["data"]
    assert [(entry["actor"]["name"], entry["data"]) for entry in audited] == [("ada", {"from": 0, "to": 5})]
    api.http.post(f"/jobs/{third}/cancel")
    over = api.http.patch(f"/jobs/{third}", json={"priority": 1})
    assert (over.status_code, over.json()["error"]["code"]) == (409, "already_final")
    again = api.http.post(f"/jobs/{third}/retry").json()
    assert again["priority"] == 5, "what was asked for last"


def test_a_job_of_two_gpus_is_seen_on_both(api: Any, box: str) -> None:
    with api.database.write() as session:
        nodes.register(session, "qbox", "worker-of-qbox", "0.1.0", [gpu(0), gpu(1), gpu(2), PREPARE], [], [])
    wide, wider = ready(api, resources={"gpus": 2}), ready(api, resources={"gpus": 3})
    told = api.http.get(f"/jobs/{wider}").json()
    assert told["queue"]["reason"] == "2nd in line; 3 of 3 free; needs 3 slots" and told["slots"] == []
    three = [Slot(f"GPU-{n}", "gpu", "amd", "gfx942", 192 << 30) for n in range(3)]
    with api.database.write() as session:
        won = claims.claim(session, "worker-of-qbox", "qbox", three[0], 600, beside=three)
    with api.database.write() as session:
        assert claims.claim(session, "worker-of-qbox", "qbox", three[2], 600, beside=three[2:]) is None, "kept"
    assert won is not None and won.token.job_id == wide
    shown = api.http.get(f"/jobs/{wide}").json()
    jobs_schemas.JobView.model_validate(shown, extra="forbid")
    assert (shown["node"], shown["slots"]) == ("qbox", ["qbox/0", "qbox/1"])
    listed = {row["id"]: row["slots"] for row in api.http.get("/jobs").json()["data"]}
    assert (listed[wide], listed[wider]) == (["qbox/0", "qbox/1"], [])
    assert "qbox/0, qbox/1" in eft(api, "show", wide).stdout
    seats = {row["gpu"]: row["job"] for row in api.http.get("/gpus").json()["data"] if row["node"] == "qbox"}
    assert seats == {"qbox/0": wide, "qbox/1": wide, "qbox/2": None}
    (row,) = [row for row in api.http.get("/nodes").json()["data"] if row["name"] == "qbox"]
    assert [slot["job"] for slot in row["slots"]] == [wide, wide, None, None]
    kept = api.http.get(f"/jobs/{wider}").json()["queue"]["reason"]
    assert kept == "1st in line; 1 of 3 free (qbox/2 kept for it); needs 3 slots"
    with api.database.write() as session:
        finish(session, won.token, "train", Succeeded({"ok": True}), 0, RetryPolicy())


def test_a_project_lets_itself_be_preempted(api: Any, box: str) -> None:
    set_to = api.http.post("/limits", json={"scope": "project", "name": "lab", "preemptible": True})
    schemas.LimitView.model_validate(set_to.json(), extra="forbid")
    assert (set_to.status_code, set_to.json()["preemptible"]) == (200, True)
    audited = api.http.get("/audit?action=limits.set").json()["data"][0]
    assert audited["data"] == {"preemptible": True}
    wrong = api.http.post("/limits", json={"scope": "owner", "name": "ada", "preemptible": True})
    assert wrong.status_code == 422 and "scope: project" in wrong.text
    done = eft(api, "projects", "set", "--not-preemptible")
    assert done.stdout == "lab: its running jobs stay\n", done.stderr
    assert api.http.get("/projects/lab").json()["preemptible"] is False
    assert api.http.patch("/projects/lab", json={"preemptible": True}).json()["preemptible"] is True
    assert [row["preemptible"] for row in api.http.get("/projects").json()["data"] if row["name"] == "lab"] == [True]
    entries = api.http.get("/audit?action=project.set").json()["data"]
    assert [(entry["actor"]["name"], entry["data"]["preemptible"]) for entry in entries] == [
        ("ada", True),
        ("ada", False),
    ]


def test_gpus_and_holds(api: Any, box: str) -> None:
    shown = {row["gpu"]: row for row in api.http.get("/gpus").json()["data"]}
    assert (shown["qbox/0"]["state"], shown["qbox/0"]["bf16"], shown["qbox/0"]["labels"]) == ("free", True, ["fast"])
    assert shown["qbox/1"]["state"] == "outside"
    assert shown["qbox/1"]["processes"] == [{"pid": 4711, "user": "bob", "name": "python", "bytes": 1 << 30}]
    assert [(shown[name]["busy_percent"], shown[name]["used_bytes"]) for name in ("qbox/0", "qbox/1")] == [
        (3, 7),
        (None, None),
    ]
    with api.database.write() as session:
        session.execute(update(Node).where(Node.name == "qbox").values(heartbeat_at=db_now() - 3600))
    row = next(row for row in api.http.get("/gpus").json()["data"] if row["gpu"] == "qbox/0")
    assert (row["state"], row["busy_percent"], row["used_bytes"]) == ("silent", None, None), "that was long ago"
    with api.database.write() as session:
        session.execute(update(Node).where(Node.name == "qbox").values(heartbeat_at=db_now()))
    done = eft(api, "gpu", "hold", "qbox/0", "--until", "2h", "--for", "bob", "--why", "notebook")
    assert done.stdout.startswith("qbox/0 held until ") and done.stdout.endswith(" for bob\n"), done.stderr
    (held,) = api.http.get("/holds").json()["data"]
    gpu_schemas.HoldList.model_validate({"data": [held]}, extra="forbid")
    assert (held["gpu"], held["by"], held["for"], held["kind"]) == ("qbox/0", "ada", "bob", "hold")
    row = next(row for row in api.http.get("/gpus").json()["data"] if row["gpu"] == "qbox/0")
    gpu_schemas.GpuList.model_validate({"data": [row]}, extra="forbid")
    assert row["state"] == "held" and "for bob (notebook)" in row["reason"]
    again = api.http.post("/holds", json={"gpus": ["qbox/0"]})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_held")
    theirs = api.client("another-lab", "cyd").post("/holds/release", json={"gpus": ["qbox/0"]})
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (409, "held_by_another")
    assert "held" in eft(api, "gpu", "list").stdout
    assert eft(api, "gpu", "release", "qbox/0").stdout == "qbox/0 released for bob\n"
    assert eft(api, "gpu", "drain", "qbox/0", "--why", "a fan").stdout == "qbox/0 drained\n"
    member = api.client("lab", "mel").post("/gpus/undrain", json={"gpus": ["qbox/0"]})
    assert (member.status_code, member.json()["error"]["code"]) == (403, "box_admin_only")
    assert eft(api, "gpu", "undrain", "qbox/0").returncode == 0
    history = api.http.get("/gpus/history", params={"gpu": "qbox/0"}).json()
    gpu_schemas.SpanList.model_validate(history, extra="forbid")
    assert [(span["what"], span["by"], span["why"]) for span in history["data"][:2]] == [
        ("drain", "ada", "a fan"),
        ("hold", "ada", "for bob notebook"),
    ]
    unknown = api.http.get("/gpus/history", params={"gpu": "qbox/9"})
    assert unknown.status_code == 404 and "qbox/0" in unknown.text
    late = api.http.post("/holds", json={"gpus": ["qbox/0"], "until": "2001-01-01T00:00:00Z"})
    assert (late.status_code, late.json()["error"]["field"]) == (422, "until")
    naive = api.http.post("/holds", json={"gpus": ["qbox/0"], "until": "2099-01-01T00:00:00"})
    assert naive.status_code == 422 and "timezone" in naive.text


def test_maintenance(api: Any, box: str) -> None:
    with api.database.write() as session:  # two that have gone: they hold out no hope
        for name, drained_at in (("gone", None), ("drained", db_now())):
            nodes.register(session, name, f"worker-of-{name}", "0.1.0", [gpu(0)], [], [])
            aged = {"heartbeat_at": db_now() - 3600, "drained_at": drained_at}
            session.execute(update(Node).where(Node.name == name).values(aged))
    job_id = ready(api, resources={"max_runtime_seconds": 36_000})
    done = eft(api, "maintenance", "plan", "--from", "3h", "--until", "5h", "--why", "new fans", "qbox")
    assert done.returncode == 0 and "qbox" in done.stdout and "new fans" in done.stdout, done.stderr
    (planned,) = api.http.get("/maintenance").json()["data"]
    gpu_schemas.MaintenanceView.model_validate(planned, extra="forbid")
    told = api.http.get(f"/jobs/{job_id}").json()["queue"]
    assert (told["code"], told["position"]) == ("maintenance", None)
    assert planned["id"] in eft(api, "maintenance", "list").stdout
    assert eft(api, "maintenance", "cancel", planned["id"]).stdout == f"{planned['id']} cancelled\n"
    assert api.http.get(f"/jobs/{job_id}").json()["queue"]["position"] == 1
    assert eft(api, "maintenance", "plan", "--from", "nonsense", "--until", "5h").returncode == 2


def test_quotas_and_usage(api: Any, box: str) -> None:
    done = eft(api, "quota", "set", "project", "lab", "--max-running", "0", "--disk-gb", "1.5")
    assert done.stdout == "project lab: max_running 0, disk_bytes 1.5e+09\n", done.stderr
    job_id = ready(api)
    told = api.http.get(f"/jobs/{job_id}").json()["queue"]
    assert (told["code"], told["reason"]) == ("quota", "project lab: quota of 0 running jobs is used")
    theirs = api.client("another-lab", "cyd").get("/queue").json()["data"]
    assert [row["reason"] for row in theirs] == ["a quota is used up"]
    assert eft(api, "quota", "set", "project", "lab", "--max-running", "none").stdout == (
        "project lab: disk_bytes 1.5e+09\n"
    )
    sessions = ("--max-adapters", "3", "--session-gb", "2", "--session-hours-week", "1.5")
    told = eft(api, "quota", "set", "project", "lab", *sessions).stdout
    assert told == "project lab: max_adapters 3, session_hours_week 1.5, session_bytes 2e+09, disk_bytes 1.5e+09\n"
    listed = eft(api, "quota", "list").stdout
    assert "ADAPTERS" in listed and "SESSION DISK" in listed and "PREVIEWS" not in listed, listed
    (row,) = api.http.get("/limits").json()["data"]
    schemas.LimitView.model_validate(row, extra="forbid")
    assert (row["scope"], row["name"], row["max_running"], row["disk_bytes"]) == ("project", "lab", None, 1_500_000_000)
    assert api.client("another-lab", "cyd").get("/limits").json()["data"] == []
    token = api.go_on(job_id)
    with api.database.write() as session:
        session.execute(update(Allocation).where(Allocation.job_id == job_id).values(gpus=1))
        session.execute(
            update(Allocation).where(Allocation.job_id == job_id).values(created_at=Allocation.created_at - 7200)
        )
    api.end(token, Succeeded({"ok": True}))
    with api.database.write() as session:
        assert usage.charge(session) == 1
    since = (datetime.now(UTC) - timedelta(days=2)).date().isoformat()
    report = api.http.get("/usage", params={"since": since}).json()
    schemas.UsageList.model_validate(report, extra="forbid")
    (mine,) = [row for row in report["data"] if row["project"] == "lab" and row["owner"] == "ada"]
    assert mine["gpu_hours"] == pytest.approx(2.0, abs=0.01)
    assert 0 < mine["counted_hours"] < 2.0, "a CPU slot counts a tenth, and what is over fades"
    text = eft(api, "usage", "--csv", "--since", since).stdout
    rows = list(csv.DictReader(io.StringIO(text)))
    assert float(next(row for row in rows if row["owner"] == "ada" and row["project"] == "lab")["gpu_hours"]) == (
        pytest.approx(2.0, abs=0.01)
    )
    assert {row["project"] for row in api.client("another-lab", "cyd").get("/usage").json()["data"]} <= {"another-lab"}
    assert "2.00" in eft(api, "usage", "--since", since).stdout


def test_what_would_go(api: Any, box: str) -> None:
    job_id, token = api.start_job()
    api.end(token, Succeeded({"ok": True}))
    (api.layout.attempt(job_id, token.attempt) / "checkpoints").mkdir(parents=True)
    with api.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(finished_at=db_now() - 31 * 86_400))
    told = json.loads(eft(api, "gc", "--dry-run", "--json").stdout)
    schemas.Collected.model_validate(told, extra="forbid")
    assert told["dry_run"] and job_id in {row["id"] for row in told["data"]}
    assert job_id in eft(api, "gc").stdout
    assert not (api.layout.attempt(job_id, token.attempt) / "checkpoints").exists()
    assert api.client("lab", "mel").post("/gc").status_code == 403


def test_times_as_people_type_them() -> None:
    now = datetime(2026, 11, 21, 15, 30, tzinfo=UTC)
    for text, after in {"2h": 7200, "1.5h": 5400, "3d": 259_200, "10m": 600}.items():
        assert datetime.fromisoformat(point(text, now)).timestamp() == now.timestamp() + after
    clock = datetime.fromisoformat(point("18:00", now))
    assert (clock.hour, clock.minute) == (18, 0) and 0 < (clock - now).total_seconds() <= 86_400
    assert point("2026-11-22T08:00:00+01:00", now) == "2026-11-22T08:00:00+01:00"
    assert datetime.fromisoformat(point("2026-11-22 08:00", now)).tzinfo is not None
