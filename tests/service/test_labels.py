"""Tags, notes and the archive: what people say of jobs, and lists that follow it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from core.jobs.lifecycle.finish import Succeeded
from tests.service.conftest import Api
from tests.support.client import eft


def listed(api: Api, **params: Any) -> list[str]:
    reply = api.http.get("/jobs", params={"limit": 200, **params})
    assert reply.status_code == 200, reply.text
    return [job["id"] for job in reply.json()["data"]]


@pytest.mark.both_databases
def test_jobs_are_found_by_all_of_their_tags_and_by_nothing_else(api: Api) -> None:
    one = api.submit(tags=["lr:1e-4", "paper", "paper"], note="a first try")
    other = api.submit(tags=["paper"])
    api.submit(tags=["paper_2", "lr:1e-45"])
    assert one["tags"] == ["lr:1e-4", "paper"] and one["note"] == "a first try" and one["archived_at"] is None
    assert listed(api, tag="paper") == [other["id"], one["id"]]
    assert listed(api, tag=["paper", "lr:1e-4"]) == [one["id"]]
    assert listed(api, tag="pape") == listed(api, tag="paper-2") == []
    changed = api.http.patch(f"/jobs/{other['id']}", json={"tags": ["best"], "note": "kept"}).json()
    assert (changed["tags"], changed["note"]) == (["best"], "kept")
    assert listed(api, tag="paper") == [one["id"]] and listed(api, tag="best") == [other["id"]]
    cleared = api.http.patch(f"/jobs/{other['id']}", json={"tags": [], "note": ""}).json()
    assert (cleared["tags"], cleared["note"]) == ([], None)
    spec = api.http.get(f"/jobs/{one['id']}").json()["spec"]
    assert spec["tags"] == ["lr:1e-4", "paper"], "the spec stays as submitted"


def test_an_ended_job_is_archived_and_comes_back(api: Api) -> None:
    running, token = api.start_job(name="to archive")
    refused = api.http.patch(f"/jobs/{running}", json={"archived": True})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "not_ended", refused.text
    api.end(token, Succeeded({}))
    assert api.http.patch(f"/jobs/{running}", json={"archived": True}).json()["archived_at"] is not None
    assert running not in listed(api) and running in listed(api, archived=True)
    assert api.http.get("/jobs/to archive").json()["id"] == running, "its name is still a handle"
    assert api.http.patch(f"/jobs/{running}", json={"archived": False}).json()["archived_at"] is None
    assert running in listed(api)
    audit = api.http.get(f"/audit?action=job.archive&target={running}").json()["data"]
    assert [one["data"]["archived"] for one in audit] == [False, True]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, ""),
        ({"tags": ["a b"]}, "tags"),
        ({"tags": [str(number) for number in range(21)]}, "tags"),
        ({"note": "x" * 2001}, "note"),
        ({"archived": "yes"}, "archived"),
    ],
)
def test_a_change_that_is_none_is_refused_by_its_field(api: Api, body: dict[str, Any], field: str) -> None:
    reply = api.http.patch(f"/jobs/{api.submit()['id']}", json=body)
    assert reply.status_code == 422 and field in (reply.json()["error"]["field"] or ""), reply.text


def test_a_tag_that_no_job_can_have_is_no_empty_list(api: Api) -> None:
    reply = api.http.get("/jobs", params={"tag": 'a"b'})
    assert reply.status_code == 422 and reply.json()["error"]["field"] == "tag", reply.text


def test_the_commands(api: Api) -> None:
    job = api.submit(name="labelled", tags=["one"])["id"]

    def run(*words: str) -> str:
        done = eft(api, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("tag", "labelled", "two", "--remove", "one") == f"{job} two\n"
    assert [one["id"] for one in json.loads(run("jobs", "--tag", "two", "--json"))["data"]] == [job]
    run("note", job, "a note of several words")
    assert run("note", "labelled") == "a note of several words\n"
    assert "a note of several words" in run("show", job)
    api.http.post(f"/jobs/{job}/cancel")
    run("archive", job)
    assert job not in run("ls", "--limit", "1000") and job in run("ls", "--limit", "1000", "--archived")
    run("unarchive", job)
    assert job in run("ls", "--limit", "1000")
