"""Previews and samples over HTTP: asked for at a real API, found out by a real worker on a slot without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eft.terminal import trial
from sqlalchemy import select

from core.db.tables import Attempt, Job
from core.jobs.lifecycle.claims import Slot, claim
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.plan.constants import MOST_ALIKE
from core.settings import Settings
from tests.support import selftest
from tests.support.client import eft, environment
from tests.support.eft_forks import program
from tests.support.target import until
from worker.agent.agent import Agent


def row(n: int) -> dict[str, Any]:
    ask, answer = f"lamp {n % 9} on", "lamp.on " * (n % 9 + 1)
    return {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}


ROWS = [row(n) for n in range(12)]
OPTIONS = {"training": {"max_length": 64, "per_device_train_batch_size": 2, "num_train_epochs": 2.0}}


def jsonl(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """In a folder where tests put others beside it."""
    return Path(shutil.copytree(tiny_dir, tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def box(start_api: Any, tiny: Path, forked: None) -> Iterator[Any]:
    """An API that takes the tiny model; what `work` starts are forks."""
    with start_api(model_roots=tiny.parent) as api:
        yield api


def work(api: Any, tiny: Path) -> None:
    """What a worker of this box finds to do, until there is nothing more."""
    settings = Settings(
        data=api.root, database_url=api.database_url, node="box", model_roots=(tiny.parent,), spare=False
    )
    selftest.lay(api.root, "box")
    agent = Agent(settings)
    agent.start(lambda _: None, lambda: 0)
    try:
        agent.serve()
    finally:
        agent.stop()


def test_a_preview_says_what_training_would_do(box: Any, tiny: Path) -> None:
    file_id = box.upload(jsonl(ROWS))["id"]
    asked = box.http.post(f"/files/{file_id}/preview", json={"model": str(tiny), **OPTIONS})
    assert asked.status_code == 202, asked.text
    preview = asked.json()
    assert asked.headers["location"] == preview["links"]["self"] == f"/files/{file_id}/previews/{preview['id']}"
    assert (preview["status"], preview["result"]) == ("queued", None)
    assert box.http.delete(f"/files/{file_id}").status_code == 409
    work(box, tiny)
    found = box.http.get(preview["links"]["self"], params={"wait": 5}).json()
    assert (found["status"], found["failure"]) == ("succeeded", None), found
    result = found["result"]
    assert result["ok"] and result["format"] == "messages"
    assert result["rows"]["file"] == 12 and result["rows"]["used"] + result["rows"]["dropped"] == 12
    assert 0 < result["rows"]["truncated"] < 12 and result["tokens"]["longest"] > 64
    assert sum(part["rows"] for part in result["tokens"]["histogram"]) == 12
    assert result["duplicates"]["rows"] == 3 and result["duplicates"]["examples"][0] == {"line": 1, "again": [10]}
    assert result["epoch"]["total_steps"] == 2 * result["epoch"]["steps"] and 0 <= result["epoch"]["padding_share"] < 1
    assert len(result["samples"]) == 10
    prompt, answer = result["samples"][0]["segments"][:2]
    assert (prompt["learned"], answer["learned"]) == (False, True)
    assert "lamp 0 on" in prompt["text"] and answer["text"].startswith("lamp.on")
    # No job among the jobs, and no slot of theirs.
    assert box.http.get("/jobs").json()["data"] == []
    assert box.http.get(f"/jobs/{preview['id']}").status_code == 404
    with box.database.read() as session:
        rows = session.execute(select(Attempt.kind, Attempt.slot).order_by(Attempt.attempt)).all()
    assert [tuple(row) for row in rows] == [("prepare", "preview-0"), ("preview", "preview-0")]
    # Asked again it is the same one, and drawn by the client.
    again = box.http.post(f"/files/{file_id}/preview", json={"model": str(tiny), **OPTIONS})
    assert (again.status_code, again.json()["id"]) == (200, preview["id"])
    settings = [part for key, value in OPTIONS["training"].items() for part in ("--set", f"training.{key}={value}")]
    drawn = eft(box, "files", "preview", file_id, "--model", str(tiny), *settings)
    assert drawn.returncode == 0, drawn.stderr
    assert "⟦lamp.on" in drawn.stdout and "\x1b[" not in drawn.stdout
    assert [one["id"] for one in box.http.get(f"/files/{file_id}/previews").json()["data"]] == [preview["id"]]
    # It holds nothing any more.
    assert box.http.delete(f"/files/{file_id}").status_code == 200
    assert box.http.get(preview["links"]["self"]).status_code == 404


def test_a_model_that_cannot_be_read_is_the_previews_failure(box: Any, tiny: Path) -> None:
    file_id = box.upload(jsonl(ROWS))["id"]
    empty = tiny.parent / "empty"
    empty.mkdir(exist_ok=True)
    preview = box.http.post(f"/files/{file_id}/preview", json={"model": str(empty)}).json()
    work(box, tiny)
    found = box.http.get(preview["links"]["self"]).json()
    assert found["status"] == "failed" and found["failure"]["field"] == "model.path", found
    assert found["failure"]["class"] == "user"
    # A question that failed may be asked anew.
    assert box.http.post(f"/files/{file_id}/preview", json={"model": str(empty)}).json()["id"] != preview["id"]


def test_of_another_project_there_is_nothing(api: Any) -> None:
    file_id, other = api.upload(jsonl(ROWS))["id"], api.upload(jsonl(ROWS[:3]))["id"]
    preview = api.http.post(f"/files/{file_id}/preview", json={"model": "a/b"}).json()
    stranger = api.client("elsewhere", "bob")
    for method, path in (
        ("POST", f"/files/{file_id}/preview"),
        ("GET", f"/files/{file_id}/previews"),
        ("GET", preview["links"]["self"]),
    ):
        reply = stranger.request(method, path, **({"json": {"model": "a/b"}} if method == "POST" else {}))
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found"), path
    assert api.http.get(f"/files/{other}/previews/{preview['id']}").status_code == 404
    assert api.http.get(f"/files/{file_id}/previews/preview-nope").status_code == 404
    with api.database.read() as session:
        assert session.execute(select(Job.project_id).where(Job.id == preview["id"])).scalar_one() != ""


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "model"),
        ({"model": "a/b", "training": {"max_lenght": 5}}, "training.max_lenght"),
        ({"model": "a/b", "data": {"train": "file-01kar3v8x5m2h6n9qst4wyz0bc"}}, "data.train"),
        ({"model": "a/b", "data": {"train": {"type": "path", "path": "/x"}}}, "data.train"),
        ({"model": "a/b", "data": {"train": {"format": "text"}}}, "data.train.format"),
        ({"model": "/etc"}, "model.path"),
    ],
)
def test_bad_options_are_named(api: Any, body: dict[str, Any], field: str) -> None:
    file_id = api.upload(jsonl(ROWS))["id"]
    reply = api.http.post(f"/files/{file_id}/preview", json=body)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error"]["field"] == field
    assert api.http.get(f"/files/{file_id}/previews").json() == {"data": []}


def test_rows_of_stages_to_come_can_be_previewed_not_trained_on(api: Any) -> None:
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}]
    file_id = api.upload(jsonl(rows))["id"]
    reply = api.http.post("/jobs", json={"model": "a/b", "data": file_id})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "rows_of_another_stage")
    assert api.http.post(f"/files/{file_id}/preview", json={"model": "a/b"}).status_code == 202


def test_samples_stand_beside_the_base(api: Any) -> None:
    job_id, token = api.start_job()
    path = f"/jobs/{job_id}/samples"
    assert api.http.get(path).json() == {"steps": [], "step": None, "data": []}

    def told(step: int, answer: str) -> dict[str, Any]:
        one = {"row": 0, "prompt": "hi", "reference": "ho", "completion": answer, "new_tokens": 1, "finished": True}
        return {"type": "samples", "step": step, "samples": [one]}

    api.tell(token, told(0, "base"), told(5, "better"), told(10, "worse"))
    found = api.http.get(path).json()
    assert (found["steps"], found["step"]) == ([0, 5, 10], 10)
    (one,) = found["data"]
    assert (one["prompt"], one["reference"], one["base"], one["tuned"]) == ("hi", "ho", "base", "worse")
    best = {"step": 5, "metric": "eval_loss", "value": 1.0, "restored": True}
    api.end(token, Succeeded({"steps": 10, "best": best}))
    assert api.http.get(path).json()["step"] == 5  # what is handed back
    assert api.http.get(path, params={"step": 10}).json()["data"][0]["tuned"] == "worse"
    missing = api.http.get(path, params={"step": 7})
    assert (missing.status_code, missing.json()["error"]["field"]) == (404, "step")
    assert api.client("elsewhere", "bob").get(path).status_code == 404
    drawn = eft(api, "samples", job_id)
    assert drawn.returncode == 0 and "better" in drawn.stdout and "base" in drawn.stdout


def test_rollouts_are_served_by_step(api: Any) -> None:
    file_id = api.upload(jsonl([{"prompt": "3 + 4?", "reference": "7"}]))["id"]
    stage = {"type": "grpo", "num_generations": 3, "num_iterations": 2, "reward": ["number"]}
    training = {"per_device_train_batch_size": 3, "max_length": 512}
    job_id, token = api.start_job(data=file_id, stage=stage, training=training)
    path = f"/jobs/{job_id}/rollouts"
    empty = {"newest": None, "step": None, "sampler_mismatch_kl": None, "data": [], "next": None}
    assert api.http.get(path).json() == empty
    assert api.http.get(path, params={"step": 1}).status_code == 404

    def made(attempt: int, number: int, *completions: str) -> None:
        folder = api.layout.attempt(job_id, attempt) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            {"rollout": number, "step": number * 2 + 1, "line": 1, "sample": at, "prompt": "3 + 4?", "completion": text,
             "tokens": len(text), "finished": True, "rewards": {"number": float(text == "7")},
             "reward": float(text == "7"), "advantage": 0.5}
            for at, text in enumerate(completions)
        ]  # fmt: skip
        (folder / f"{number:08d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    made(1, 0, "1", "2", "7")
    made(1, 1, "lost", "lost", "lost")
    made(2, 1, "8", "9", "7")  # resumed: the second rollout was made again
    (api.layout.attempt(job_id, 2) / "rollouts" / "00000002.new").write_text("{")
    api.tell(token, {"type": "metrics", "step": 3, "values": {"sampler_mismatch_kl": 0.25}})
    found = api.http.get(path).json()
    assert (found["newest"], found["step"], found["sampler_mismatch_kl"], found["next"]) == (3, 3, 0.25, None)
    assert [one["completion"] for one in found["data"]] == ["8", "9", "7"]
    assert found["data"][2] == {
        "line": 1, "sample": 2, "prompt": "3 + 4?", "completion": "7", "tokens": 1, "finished": True,
        "rewards": {"number": 1.0}, "reward": 1.0, "unscored": {}, "advantage": 0.5, "detail": None, "turns": None,
    }  # fmt: skip
    for step in (1, 2):
        first = api.http.get(path, params={"step": step, "limit": 2}).json()
        assert (first["step"], len(first["data"]), first["next"]) == (1, 2, 2)
    rest = api.http.get(path, params={"step": 1, "limit": 2, "offset": 2}).json()
    assert ([one["completion"] for one in rest["data"]], rest["next"]) == (["7"], None)
    missing = api.http.get(path, params={"step": 5})
    assert (missing.status_code, missing.json()["error"]["field"]) == (404, "step")
    assert "steps 1 to 4" in missing.json()["error"]["message"]
    assert api.client("elsewhere", "bob").get(path).status_code == 404
    made(2, 2, "a" * 700_000, "b" * 700_000, "c")
    long = api.http.get(path).json()
    assert ([one["completion"][0] for one in long["data"]], long["next"]) == (["a"], 1)
    drawn = eft(api, "rollouts", job_id, "--step", "3")
    assert drawn.returncode == 0 and "3 + 4?" in drawn.stdout and "reward 1 (number 1), advantage +0.50" in drawn.stdout


def test_rewards_are_tried_before_a_training(box: Any, tiny: Path, tmp_path: Path) -> None:
    """As docs/rollouts.md says."""
    assert trial.ALIKE == MOST_ALIKE, "the client, which imports nothing of core, has the same bound"
    file_id = box.upload(jsonl([{"prompt": f"letter {n}?", "reference": "a"} for n in range(3)]))["id"]
    stage = {"type": "grpo", "num_generations": 2, "max_completion_length": 4, "reward": ["exact"]}
    training = {"per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"}
    job = {
        "model": str(tiny),
        "data": file_id,
        "method": {"type": "lora", "r": 4},
        "stage": stage,
        "training": training,
    }
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    text = box.upload(b'{"text": "a"}\n')["id"]
    assert box.http.post("/rewards/try", json={"model": str(tiny), "data": text}).json()["error"]["field"] == "stage"
    asked = box.http.post("/rewards/try", json=job, headers={"idempotency-key": "once"})
    assert asked.status_code == 202, asked.text
    aside = asked.json()
    assert box.http.post("/rewards/try", json=job, headers={"idempotency-key": "once"}).json()["id"] == aside["id"]
    assert box.http.post("/jobs?dry_run=true", json=job).status_code == 200  # nothing is known yet
    assert box.http.post(f"{aside['links']['self']}/cancel").json()["status"] == "cancelled"
    command = [program(), "rewards", "try", str(path)]
    asking = subprocess.Popen(command, env=environment(box), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    queued = select(Job.id).where(Job.kind == "trial", Job.status == "queued")

    def waiting() -> str | None:
        with box.database.read() as session:
            return session.execute(queued).scalar_one_or_none()

    until(lambda: waiting() is not None or asking.poll() is not None)
    trial_id = waiting()
    work(box, tiny)
    drawn, told = asking.communicate(timeout=300)
    assert asking.returncode == 2 and "3 of 3 (100%)" in drawn and "stage.force" in drawn, (drawn, told)
    self_link = f"/rewards/try/{trial_id}"
    found = box.http.get(self_link).json()
    assert (found["status"], found["failure"]) == ("succeeded", None), found
    result = found["result"]
    # Random letters are never "a" alone four tokens long, in no answer.
    assert (result["prompts"], result["answers"], result["share_alike"]) == (3, 6, 1.0)
    assert result["reward"]["histogram"] == [{"from": 0.0, "to": 0.0, "answers": 6}]
    assert result["step"]["train_seconds"] is None and result["step"]["rollout_seconds"] > 0
    with box.database.read() as session:
        rows = session.execute(select(Attempt.kind, Attempt.slot).where(Attempt.job_id == trial_id)).all()
    assert [tuple(row) for row in rows] == [("prepare", "prepare-0"), ("trial", "cpu")]
    assert box.http.get("/jobs").json()["data"] == []
    # A job on the same rewards is refused, by whatever way it comes, unless it is wanted all the same.
    for route in ("/jobs", "/jobs?dry_run=true"):
        refused = box.http.post(route, json=job)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "rewards_do_not_teach"), refused.text
        assert "stage.force" in refused.json()["error"]["message"]
    # A file that was uploaded once more has the same prompts, and another loss learns no more from them.
    again = box.upload(jsonl([{"prompt": f"letter {n}?", "reference": "a"} for n in range(3)]))["id"]
    assert again != file_id
    for other in ({"data": again}, {"stage": stage | {"loss": "gspo", "num_iterations": 2, "slots": 2}}):
        refused = box.http.post("/jobs?dry_run=true", json=job | other)
        assert refused.json()["error"]["code"] == "rewards_do_not_teach", (other, refused.text)
    others = box.upload(jsonl([{"prompt": f"letter {n}!", "reference": "a"} for n in range(3)]))["id"]
    assert box.http.post("/jobs?dry_run=true", json=job | {"data": others}).status_code == 200
    sharper = job | {"stage": stage | {"temperature": 1.5}}
    assert box.http.post("/jobs?dry_run=true", json=sharper).status_code == 200
    assert box.http.post("/jobs", json=job | {"stage": stage | {"force": True}}).status_code == 201
    assert box.client("elsewhere", "bob").get(self_link).status_code == 404


def test_a_trial_holds_for_jobs_on_the_same_task(api: Any) -> None:
    """Problems of a task are the same by their fields, and no file is named."""
    task = {"type": "task", "name": "chain_sum", "size": 40, "level": 0}
    job = {"model": "org/tiny", "data": {"train": task}, "stage": {"type": "grpo", "reward": ["task"]}}
    job["training"] = {"max_length": 512}
    api.clear_line()
    for alike in (30, 28):  # of 32; the newest counts
        asked = api.http.post("/rewards/try", json=job)
        assert asked.status_code == 202, asked.text
        with api.database.write() as session:
            prepared = claim(session, "wrk-test", "box", Slot("prepare-9", "prepare"), 600)
            assert prepared is not None and prepared.token.job_id == asked.json()["id"]
            finish(session, prepared.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
        token = api.go_on(asked.json()["id"])
        found = {"share_alike": alike / 32, "groups_alike": alike, "prompts": 32}
        with api.database.write() as session:
            finish(session, token, "trial", Succeeded(found), 0, RetryPolicy())
        answer = api.http.post("/jobs?dry_run=true", json=job)
        assert answer.status_code == (422 if alike == 30 else 200), answer.text
        other = job | {"data": {"train": task | {"level": 1}}}
        assert api.http.post("/jobs?dry_run=true", json=other).status_code == 200
