"""Sweeps over HTTP and in the command: all runs checked, all submitted or none, one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.jobs.lifecycle.sweeps import advance
from tests.service.conftest import MODEL, ROWS, Api, jsonl
from tests.support.client import eft

GRID = {"optimizer.learning_rate": [1e-4, 2e-4], "method.r": [8, 16]}


def body(api: Api, **more: Any) -> dict[str, Any]:
    data = {"train": api.upload(jsonl(ROWS))["id"], "split": {"eval_fraction": 0.5}}
    return {"name": "rates", "model": MODEL, "data": data, "method": "lora", "sweep": GRID, **more}


def count(api: Api) -> int:
    return len(api.http.get("/jobs", params={"limit": 200, "archived": True}).json()["data"])


@pytest.mark.both_databases
def test_a_sweep_is_its_runs_with_their_values_once_a_key(api: Api) -> None:
    asked, before = body(api), count(api)
    dry = api.http.post("/sweeps", json=asked, params={"dry_run": "true"}).json()
    assert dry["runs"] == 4 and dry["points"][3] == {"optimizer.learning_rate": 2e-4, "method.r": 16}
    assert dry["first"]["method"]["r"] == 8 and dry["sweep"]["metric"] == "eval_loss" and count(api) == before
    key = {"idempotency-key": asked["data"]["train"]}
    replies = [api.http.post("/sweeps", json=asked, headers=key) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [201, 201], replies[0].text
    made = replies[0].json()
    assert made == replies[1].json() and count(api) == before + 4
    assert [run["name"] for run in made["runs"]] == ["rates-1", "rates-2", "rates-3", "rates-4"]
    assert made["status"] == "running" and made["best"] is None
    job = api.http.get(f"/jobs/{made['runs'][2]['job']}").json()
    assert (job["sweep_id"], job["spec"]["optimizer"]["learning_rate"]) == (made["id"], 2e-4)
    assert api.http.get("/sweeps/last").json()["id"] == made["id"]
    assert api.http.get("/sweeps", params={"limit": 1}).json()["data"][0]["id"] == made["id"]
    assert api.http.delete(f"/sweeps/{made['id']}").status_code == 409
    ended = api.http.post(f"/sweeps/{made['id']}/cancel").json()
    assert ended["status"] == "cancelled" and {run["status"] for run in ended["runs"]} == {"cancelled"}
    assert api.http.delete(f"/sweeps/{made['id']}").json()["deleted"]


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ({"sweep": {"training.seed": list(range(100)), "method.r": list(range(1, 101))}}, "sweep_too_large", "10,000"),
        ({"sweep": {"method.rank": [8, 16]}}, None, "run 1 of 2 (method.rank=8): method.rank"),
        ({"sweep": {"method.r": [8, -1]}}, None, "run 2 of 2 (method.r=-1): method.r"),
        ({"sweep": {"fields": GRID, "metric": "eval_f1"}}, "gate_without_figure", "has no `eval_f1`"),
        ({"sweep": {"fields": GRID, "halving": {"steps": [10]}}}, "invalid_value", "evaluation.eval_steps"),
        ({"sweep": 3}, "invalid_value", "a sweep is a job with `sweep`"),
    ],
)
def test_what_is_wrong_with_one_run_stores_none(api: Api, more: dict[str, Any], code: str | None, words: str) -> None:
    asked = body(api) | more
    before = count(api)
    for params in ({"dry_run": "true"}, {}):
        reply = api.http.post("/sweeps", json=asked, params=params)
        error = reply.json()["error"]
        assert reply.status_code == 422 and words in error["message"], error
        assert code in (None, error["code"]), error
    assert count(api) == before


def test_the_command_submits_and_shows_a_table(api: Api, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl(ROWS))
    file = tmp_path / "sweep.yaml"
    file.write_text(f"name: from a file\nmodel: {MODEL}\ndata: rows.jsonl\nsweep: {{method.r: [4, 8]}}\n")
    done = eft(api, "submit", str(file), "--set", "training.seed=5")
    assert done.returncode == 0, done.stderr
    sweep = done.stdout.strip()
    shown = eft(api, "sweep", "show", "last").stdout
    assert shown.startswith(f"{sweep} (from a file) running: 2 runs") and "method.r" in shown and "train_loss" in shown
    assert eft(api, "sweep", "cancel", sweep).stdout == f"{sweep} cancelled\n"
    assert eft(api, "submit", str(file), "--fail-if", "train_loss > 1").returncode == 2
    with api.database.read() as session:
        assert sweep not in advance.due(session)
    assert eft(api, "sweep", "delete", sweep).stdout == f"{sweep} deleted\n"
