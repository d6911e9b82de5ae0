"""`/jobs/{id}/checkpoints`, `checkpoint.resume_from` of a job, and `eft checkpoints`."""

from __future__ import annotations

from typing import Any

import pytest

from core.db.tables import Job
from core.jobs.lifecycle.claims import Slot, claim
from tests.service.conftest import Api
from tests.service.test_models import made
from tests.support.client import eft
from tests.support.world import World


def with_checkpoints(api: Api, *steps: int, **spec: Any) -> str:
    """A job that has succeeded, with checkpoints of its attempt 2."""
    job_id = f"job-{made(api, **spec)[6:]}"
    for step in steps:
        World.checkpoint(api, job_id, 2, step, b"state of %d" % step)  # type: ignore[arg-type]
    return job_id


def branch(api: Api, before: str, point: str | int = "last", /, **changes: Any) -> Any:
    spec = api.http.get(f"/jobs/{before}").json()["spec"]
    spec["checkpoint"]["resume_from"] = {"job": before, "checkpoint": point}
    return api.http.post("/jobs", json=spec | changes)


def test_they_are_listed_verified_and_deleted(api: Api) -> None:
    job = with_checkpoints(api, 10, 20, name="Kept states")
    root = api.layout.attempt(job, 2) / "checkpoints"
    (root / "tmp-step-00000030-7").mkdir()
    (root / "step-00000020").rename(root / "bad-step-00000020")
    World.checkpoint(api, job, 2, 20, b"again")  # type: ignore[arg-type]
    listed = api.http.get("/jobs/Kept states/checkpoints").json()["data"]
    assert [(one["id"], one["step"], one["set_aside"]) for one in listed] == [
        ("step-00000020@2", 20, False),
        ("bad-step-00000020@2", 20, True),
        ("step-00000010@2", 10, False),
    ]
    assert eft(api, "checkpoints", "verify", job).stdout == "".join(f"{one['id']} whole\n" for one in listed)
    (root / "step-00000010" / "state").write_bytes(b"State of 10")
    (root / "step-00000020" / "state").unlink()
    found = eft(api, "checkpoints", "verify", job)
    assert found.returncode == 1, found
    assert "step-00000020@2 files differ from the manifest: state\n" in found.stdout
    assert "step-00000010@2 state has another SHA-256\n" in found.stdout
    assert "set aside: damaged" in eft(api, "checkpoints", "list", job).stdout

    assert api.http.delete(f"/jobs/{job}/checkpoints/step-00000099").status_code == 404
    for name in ("20", "bad-step-00000020@2"):
        assert eft(api, "checkpoints", "rm", job, name).returncode == 0
    assert {path.name for path in root.iterdir()} == {"tmp-step-00000030-7", "step-00000010"}
    (left,) = api.http.get(f"/jobs/{job}/checkpoints").json()["data"]
    assert left["id"] == "step-00000010@2"


@pytest.mark.both_databases
def test_a_job_begins_with_a_checkpoint_of_another(api: Api) -> None:
    job = with_checkpoints(api, 10, 20)
    reply = branch(api, job, 10, optimizer={"type": "adamw", "learning_rate": 1e-5})
    assert reply.status_code == 201, reply.text
    child, resolved = reply.json()["id"], reply.json()["spec"]["checkpoint"]["resume_from"]
    assert (resolved["job"], resolved["checkpoint"], len(resolved["sha256"])) == (job, "step-00000010@2", 64)
    with api.database.read() as session:
        row = session.get_one(Job, child)
        assert row.resume_from == [
            {
                "job": job,
                "checkpoint": "step-00000010@2",
                "sha256": resolved["sha256"],
                "changed": ["optimizer.learning_rate"],
            }
        ]
    generations = api.http.get(f"/jobs/{child}/lineage").json()["data"]
    assert [(one["job"], one["checkpoint"]) for one in generations] == [(child, None), (job, "step-00000010@2")]

    for path in (f"/jobs/{job}/checkpoints/10", f"/jobs/{job}"):
        reply = api.http.delete(path)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "job_in_use"), path
        assert child in reply.json()["error"]["message"]
    api.http.post(f"/jobs/{child}/cancel")
    again = api.http.post(f"/jobs/{child}/retry").json()["id"]
    with api.database.read() as session:
        begins = session.get_one(Job, again).resume_from
        assert [one.get("checkpoint") for one in begins] == ["step-00000010@2", None]
    api.http.post(f"/jobs/{again}/cancel")
    for one in (again, child):
        assert api.http.delete(f"/jobs/{one}").status_code == 200
    assert api.http.delete(f"/jobs/{job}/checkpoints/10").json()["deleted"]
    assert api.http.delete(f"/jobs/{job}").status_code == 200


def test_what_a_branch_is_refused_for(api: Api) -> None:
    job = with_checkpoints(api, 10)

    def error(reply: Any) -> tuple[int, str, str]:
        told = reply.json()["error"]
        return reply.status_code, told["code"], told["field"]

    field = "checkpoint.resume_from"
    assert error(branch(api, job, "11")) == (404, "not_found", f"{field}.checkpoint")
    assert error(branch(api, job, method={"type": "lora", "r": 3})) == (422, "branch_differs", "method.r")
    assert error(branch(api, job, checkpoint={"resume_from": {"job": job, "sha256": "0" * 64}})) == (
        422,
        "checkpoint_mismatch",
        f"{field}.sha256",
    )
    waiting = api.submit()["id"]
    assert error(branch(api, waiting)) == (409, "not_ended", f"{field}.job")
    told = eft(api, "checkpoints", "resume-from", job, "10", "--set", "training.max_steps=50", "--dry-run")
    assert told.returncode == 0 and "step-00000010@2" in told.stdout, told
    api.clear_line()
    child = eft(api, "checkpoints", "resume-from", job).stdout.strip()
    with api.database.write() as session:
        found = claim(session, "wrk-test", "box", Slot(f"prepare-{child}", "prepare"), 600)
        assert found is not None and found.token.job_id == child and found.resume_from[0]["job"] == job
