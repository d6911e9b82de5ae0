"""`after` of a job over HTTP and in the command: names become ids, and what can never start is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.service.conftest import MODEL, ROWS, Api, jsonl
from tests.support.client import eft


def test_names_become_ids_and_the_queue_says_what_it_waits_for(api: Api) -> None:
    first = api.submit(name="comes first")["id"]
    job = api.submit(name="comes after", after=["comes first"])
    assert job["spec"]["after"] == [{"job": first, "on": "success"}]
    assert job["reason"] == f"waits for `{first}` (comes first) to succeed"
    place = api.http.get(f"/jobs/{job['id']}").json()["queue"]
    assert (place["code"], place["position"], place["estimated_start"]) == ("after", None, None)
    assert place["reason"] == job["reason"]
    whatever = api.submit(after=[{"job": "last", "on": "end"}])
    assert whatever["spec"]["after"] == [{"job": job["id"], "on": "end"}]
    assert api.http.delete(f"/jobs/{first}").status_code == 409


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (["waits for itself"], "after_not_found"),
        (["job-00000000000000000000000000"], "after_not_found"),
        (["once", "once"], "after_twice"),
        (["stopped"], "after_failed"),
    ],
)
def test_what_can_never_start_is_refused_by_its_field(api: Api, after: list[Any], code: str) -> None:
    api.submit(name="once") if after[0] == "once" else None
    if after == ["stopped"]:
        after = [api.submit()["id"]]
        api.http.post(f"/jobs/{after[0]}/cancel")
    data = api.upload(jsonl(ROWS))["id"]
    body = {"name": "waits for itself", "model": MODEL, "data": data, "after": after}
    for params in ({}, {"dry_run": "true"}):
        error = api.http.post("/jobs", json=body, params=params).json()["error"]
        assert (error["code"], error["field"]) == (code, f"after.{len(after) - 1}.job"), error
    assert not api.http.get("/jobs", params={"name": "waits for itself"}).json()["data"]


def test_the_command_submits_a_job_behind_others(api: Api, tmp_path: Any) -> None:
    first = api.submit(name="chain one")["id"]
    file = tmp_path / "job.yaml"
    file.write_text(f"name: chain two\nmodel: {MODEL}\ndata: {api.upload(jsonl(ROWS))['id']}\n")
    done = eft(api, "submit", str(file), "--after", "chain one", "--tag", "chain")
    assert done.returncode == 0, done.stderr
    job = api.http.get(f"/jobs/{done.stdout.strip()}").json()
    assert job["spec"]["after"] == [{"job": first, "on": "success"}] and job["tags"] == ["chain"]
