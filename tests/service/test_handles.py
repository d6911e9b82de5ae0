"""What people type in the place of an id: its beginning, a name, `last`; and options in front of the command."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import Any

import pytest
from eft.terminal.output import jobs_table
from eft.types import Job
from rich.console import Console

from core.jobs.lifecycle.finish import Succeeded
from tests.service.conftest import ROWS, Api, jsonl
from tests.support.client import eft


@pytest.fixture(scope="module")
def someone(api: Api) -> Any:
    """Another user of the same project."""
    return api.client("lab", "bob")


@pytest.mark.both_databases
def test_a_job_by_its_name_the_beginning_of_its_id_and_last(api: Api, someone: Any) -> None:
    job, other = api.submit(name="Handle one")["id"], api.submit(name="Handle two")["id"]
    for handle in (job, "Handle one", job[:-3], job[4:-3], job.upper()[4:-3]):
        reply = api.http.get(f"/jobs/{handle}")
        assert reply.status_code == 200 and reply.json()["id"] == job, handle
    assert api.http.get("/jobs/last").json()["id"] == other
    theirs = api.submit(someone, name="Handle three")["id"]
    assert someone.get("/jobs/last").json()["id"] == theirs
    assert api.http.get("/jobs/last").json()["id"] == other, "`last` is the caller's own newest"
    assert api.http.post(f"/jobs/{'Handle two'}/cancel").json()["id"] == other
    assert api.http.get("/jobs/Handle two/events", params={"format": "json"}).json()["data"][-1]["data"]["to"] == (
        "cancelled"
    )


@pytest.mark.both_databases
def test_what_means_several_lists_them(api: Api) -> None:
    made = [api.submit(name="Twins")["id"] for _ in range(6)]
    reply = api.http.get("/jobs/Twins")
    body = reply.json()["error"] if "error" in reply.json() else reply.json()
    assert reply.status_code == 409 and body["code"] == "ambiguous_handle" and body["field"] == "job_id"
    assert [one in body["message"] for one in made] == [False, True, True, True, True, True], body["message"]
    assert api.http.get(f"/jobs/{made[0][:9]}").status_code == 409


@pytest.mark.parametrize(
    "handle", ["0", "job-0", "job-", "no such name", "x" * 301, "job-01%", "%25", "jo_-0123", "\u00e4"]
)
def test_what_means_nothing_is_not_found(api: Api, handle: str) -> None:
    reply = api.http.get(f"/jobs/{handle}")
    assert reply.status_code == 404 and "there is no job" in reply.text, reply.text
    short = len(handle.removeprefix("job-")) < 4
    assert ("needs at least 4 characters after `job-`" in reply.text) is short, "says why a prefix found nothing"


def test_another_projects_job_has_no_handle_here(api: Api) -> None:
    job = api.submit(name="Private run")["id"]
    stranger = api.client("elsewhere", "eve")
    for handle in ("Private run", job[:-2], job):
        assert stranger.get(f"/jobs/{handle}").status_code == 404
    reply = stranger.get("/jobs/last")
    assert reply.status_code == 404 and "you have none in this project" in reply.text


def test_files_and_webhooks(api: Api) -> None:
    file = api.upload(jsonl(ROWS[:1]), "handles of rows.jsonl")["id"]
    for handle in ("handles of rows.jsonl", file[5:-2], "last"):
        assert api.http.get(f"/files/{handle}").json()["id"] == file
    hook = api.http.post("/webhooks", json={"name": "CI", "url": "https://ci.example.org/x"})
    assert hook.status_code == 201, hook.text
    assert api.http.get("/webhooks/CI").json()["id"] == hook.json()["id"]
    assert api.http.delete("/webhooks/CI").status_code == 200


def test_the_command_keeps_to_one_job(api: Api, tmp_path: Any) -> None:
    job, token = api.start_job(name="Ended one")
    api.tell(token, {"type": "metrics", "step": 1, "values": {"loss": 3.0}})
    api.end(token, Succeeded({"train_loss": 0.5}))
    call = partial(eft, api)
    for verb in (("show",), ("status",), ("metrics",), ("logs",), ("check",), ("watch",), ("lineage",)):
        said = call(*verb, "Ended one")
        assert said.returncode == 0, (verb, said.stderr)
    waited = call("check", "last", "--wait", "--json")
    assert waited.returncode == 0 and json.loads(waited.stdout)["id"] == job
    assert call("delete", "Ended one", "--yes").stdout.startswith(f"{job} deleted")
    gone = call("show", "Ended one")
    assert gone.returncode == 6 and "Ended one" in gone.stderr
    assert call("show", "a/b").returncode == 2


def test_options_in_front_of_the_command(api: Api) -> None:
    job = api.submit(name="In front")["id"]
    listed = eft(api, "--url", api.url, "--json", "ls", "--name", "In front", EFT_URL="http://127.0.0.1:9")
    assert listed.returncode == 0 and [one["id"] for one in json.loads(listed.stdout)["data"]] == [job]
    assert eft(api, f"--url={api.url}", "show", job, EFT_URL="http://127.0.0.1:9").returncode == 0
    assert job in eft(api, "status").stdout and job in eft(api, "jobs", "--name", "In front").stdout
    assert eft(api, "cancel", job).returncode == 0
    assert job not in eft(api, "status").stdout


def test_waiting_has_an_end(api: Api) -> None:
    """The job waits for a worker that is not there."""
    job = api.submit(name="Too slow")["id"]
    said = eft(api, "check", job, "--wait", "--timeout", "0.1s")
    assert said.returncode == 124 and f"eft watch {job}" in said.stderr
    assert api.http.get(f"/jobs/{job}").json()["status"] == "queued"
    wrong = eft(api, "check", job, "--wait", "--timeout", "soon")
    assert wrong.returncode == 2 and "--timeout: 'soon' is not a length of time" in wrong.stderr


def test_a_terminal_shows_the_beginning_of_an_id_and_the_name(api: Api) -> None:
    job = api.submit(name="A name that is much longer than a column of a table")
    for width in (80, 200):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        console.print(jobs_table([Job.parse(job)], console))
        (_, line) = console.file.getvalue().splitlines()
        assert line.startswith(f"{job['id'][4:16]}  A name that is much lo") and len(line.rstrip()) <= width
    assert api.http.get(f"/jobs/{job['id'][4:16]}").json()["id"] == job["id"]
    assert job["id"] in eft(api, "ls").stdout and job["name"] in eft(api, "ls").stdout, "a pipe has all of it"


def test_a_clone_is_a_new_job_with_changed_fields(api: Api) -> None:
    old = api.submit(name="To clone", optimizer={"learning_rate": 1e-3}, training={"max_steps": 7})
    made = eft(api, "clone", "To clone", "--set", "optimizer.learning_rate=0.5", "--json")
    assert made.returncode == 0, made.stderr
    new = json.loads(made.stdout)
    assert new["id"] != old["id"] and new["name"] == "To clone copy" and new.get("retry_of") is None
    expected = old["spec"] | {"name": "To clone copy", "optimizer": old["spec"]["optimizer"] | {"learning_rate": 0.5}}
    assert new["spec"] == expected
    before = api.http.get("/jobs/last").json()["id"]
    dry = eft(api, "clone", "To clone", "--set", "training.max_steps=9", "--dry-run", "--json")
    assert json.loads(dry.stdout)["training"]["max_steps"] == 9 and api.http.get("/jobs/last").json()["id"] == before
    wrong = eft(api, "clone", "To clone", "--set", "optimizer.learning_rat=1")
    assert wrong.returncode == 2 and "learning_rate" in wrong.stderr


def test_a_retry_may_have_another_time_limit_and_nothing_else(api: Api) -> None:
    job = api.submit(name="Short of time", resources={"max_runtime_seconds": 60})["id"]
    assert api.http.post(f"/jobs/{job}/cancel").status_code == 200
    refused = eft(api, "retry", job, "--set", "training.max_steps=5")
    assert refused.returncode == 2 and "eft clone" in refused.stderr
    for body, field in (({"resources": {"gpus": 2}}, "gpus"), ({"training": {}}, "training")):
        reply = api.http.post(f"/jobs/{job}/retry", json=body)
        assert reply.status_code == 422 and field in reply.text
    made = eft(api, "retry", job, "--set", "resources.max_runtime_seconds=7200", "--json")
    assert made.returncode == 0, made.stderr
    new = json.loads(made.stdout)
    assert new["retry_of"] == job and new["spec"]["resources"]["max_runtime_seconds"] == 7200
    assert {**new["spec"], "resources": None} == {**api.http.get(f"/jobs/{job}").json()["spec"], "resources": None}
    assert api.http.post(f"/jobs/{job}/retry").json()["id"] == new["id"], "asked again"
    other = api.http.post(f"/jobs/{job}/retry", json={"resources": {"max_runtime_seconds": 60}})
    assert other.status_code == 409 and other.json()["error"]["code"] == "retried_already"
