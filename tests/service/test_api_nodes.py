"""`/nodes`: what is shown of the boxes, and draining one over HTTP and by the `eft` command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import select, update

from core.db.engine import db_now
from core.db.tables import Audit, Node
from core.jobs.lifecycle.finish import Requeued
from core.jobs.policies import nodes
from tests.support.client import eft

SLOTS = [{"id": "cpu", "kind": "cpu"}, {"id": "prepare-0", "kind": "prepare"}]


@pytest.fixture
def box(api: Any) -> str:
    """A node that a worker serves now, and `box`, where start_job lets its jobs run."""
    with api.database.write() as session:
        for name in ("box", "box-2"):
            nodes.register(session, name, f"worker-of-{name}", "0.1.0", SLOTS, ["a note"])
            nodes.drain(session, nodes.Actor(*_somebody(session)), name, "")
            session.execute(update(Node).values(drained_at=None, drained_by=None, drain_reason=None))
    return "box"


def _somebody(session: Any) -> tuple[str, str]:
    from core.db.tables import ApiKey

    row = session.execute(select(ApiKey.owner_id, ApiKey.project_id).limit(1)).one()
    return row.owner_id, row.project_id


@pytest.mark.both_databases
def test_drain_and_undrain(api: Any, box: str) -> None:
    job_id, token = api.start_job()
    shown = api.http.get(f"/nodes/{box}").json()
    assert (shown["state"], shown["drained"], shown["notes"]) == ("serving", None, ["a note"])
    assert shown["heartbeat_seconds"] < 60
    held = {slot["job"] for slot in shown["slots"] if slot["busy"]}
    assert job_id in held
    theirs = api.client("another-lab").get(f"/nodes/{box}").json()
    assert [slot["busy"] for slot in theirs["slots"]] == [slot["busy"] for slot in shown["slots"]]
    assert {slot["job"] for slot in theirs["slots"]} == {None}, "another project's jobs are not shown"

    first = ""
    for _ in range(2):
        reply = api.http.post(f"/nodes/{box}/drain", params={"reason": "a new fan"}, headers={"x-request-id": "r-7"})
        assert reply.status_code == 200
        first = first or reply.headers["x-request-id"]  # the second changes nothing
        drained = reply.json()
        assert drained["state"] == "draining"
        assert (drained["drained"]["by"], drained["drained"]["reason"]) == ("ada", "a new fan")
    api.end(token, Requeued(f"node {box} is drained"))
    job = api.http.get(f"/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("queued", f"waits to continue: node {box} is drained")
    with pytest.raises(AssertionError):
        api.go_on(job_id)  # nothing is claimed there
    with api.database.read() as session:
        last = session.execute(select(Audit).where(Audit.target == box).order_by(Audit.id.desc()).limit(1)).scalar_one()
    assert (last.action, last.request_id) == ("node.drain", first)

    assert api.http.post(f"/nodes/{box}/undrain").json()["state"] == "serving"
    api.end(api.go_on(job_id), Requeued("a test"))
    assert api.http.post(f"/jobs/{job_id}/cancel").json()["status"] == "cancelled"


@pytest.mark.both_databases
def test_states_of_a_node(api: Any, box: str) -> None:
    with api.database.write() as session:
        session.execute(update(Node).where(Node.name == "box-2").values(heartbeat_at=db_now() - 3600))
    states = {node["name"]: node["state"] for node in api.http.get("/nodes").json()["data"]}
    assert states["box-2"] == "silent"
    assert api.http.post("/nodes/box-2/drain").json()["state"] == "drained", "nothing runs there"


@pytest.mark.parametrize("path", ["/nodes/nowhere", "/nodes/nowhere/drain", "/nodes/nowhere/undrain"])
def test_an_unknown_node(api: Any, path: str) -> None:
    reply = api.http.get(path) if path.endswith("nowhere") else api.http.post(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert "GET /nodes" in reply.json()["error"]["message"]


def test_by_the_command(api: Any, box: str) -> None:
    done = eft(api, "worker", "drain", "box-2", "--reason", "new disks", "--wait")
    assert (done.returncode, done.stdout) == (0, "box-2 drained\n"), done.stderr
    listed = eft(api, "worker", "list")
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("box-2 ")]
    assert "drained" in line and "0/1" in line and "by ada: new disks" in line
    raw = json.loads(eft(api, "worker", "list", "--json").stdout)["data"]
    assert {node["name"] for node in raw} >= {"box", "box-2"}
    assert eft(api, "worker", "undrain", "box-2").stdout == "box-2 serving\n"
    unknown = eft(api, "worker", "drain", "nowhere")
    assert unknown.returncode == 6 and "there is no node `nowhere`" in unknown.stderr
