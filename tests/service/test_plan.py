"""The plan of a job through the API: what `dry_run` answers, what is refused at submit, and `eft plan`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import delete, insert, select, update

from api.jobs.service import Jobs, Submission
from core.db.tables import Attempt, Job, ModelShape, Node
from core.jobs.admission import ready, shapes
from core.jobs.admission.fit import FitsNowhere
from core.jobs.base.transitions import Actor
from core.jobs.policies import nodes
from core.plan.models.shape import Shape
from core.settings import Settings
from core.spec.axes.model import HubModel
from tests.support.eft_forks import program

MODEL = "team/llama-1b"
ROWS = b"".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}).encode() + b"\n" for n in range(40))
SHAPE = Shape.of_config(
    {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
)  # fmt: skip


def gpu(name: str, gigabytes: float, arch: str = "gfx1100") -> dict[str, Any]:
    card = {"vendor": "amd", "arch": arch, "memory_bytes": round(gigabytes * 1e9), "index": 0, "name": name}
    return {"id": f"GPU-{name}", "kind": "gpu", "host_bytes": 64 * 10**9, "gpu": card}


class World:
    """A project of its own, a model that was prepared once, and nodes, on an API that other tests use too."""

    def __init__(self, api: Any) -> None:
        self.api, self.http = api, api.client("plans")
        self.file = api.upload(ROWS, client=self.http)["id"]
        self.names: list[str] = []

    def node(self, name: str, *slots: dict[str, Any]) -> None:
        self.names.append(name)
        with self.api.database.write() as session:
            nodes.register(session, name, f"wrk-{name}", "1", slots, [])

    def learn(self) -> None:
        with self.api.database.write() as session:
            shapes.remember(session, HubModel(id=MODEL), SHAPE.as_dict())

    def plan(self, **axes: Any) -> dict[str, Any]:
        reply = self.http.post("/jobs?dry_run=true", json={"model": MODEL, "data": self.file, **axes})
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def submit(self, **axes: Any) -> Any:
        return self.http.post("/jobs", json={"model": MODEL, "data": self.file, **axes})


@pytest.fixture
def world(api: Any) -> Iterator[World]:
    with api.database.write() as session:
        session.execute(delete(Node))  # of other files' tests
    world = World(api)
    yield world
    with api.database.write() as session:
        session.execute(delete(Node).where(Node.name.in_(world.names)))
        session.execute(delete(ModelShape))


def test_an_unknown_model_has_no_plan_and_is_accepted(world: World) -> None:
    world.node("plan-small", gpu("small", 8))
    told = world.plan(method="full")
    assert told["plan"] is None and "has not been prepared here" in told["plan_reason"]
    assert world.submit(method="full").status_code == 201


def test_a_plan_tells_what_of_its_file_is_not_trained_on(world: World) -> None:
    world.learn()
    rows = b"text,intent\nlights on,lights.on\nlights off,lights.off\n"
    file = world.http.post("/files", files={"file": ("labels.csv", rows)}).json()
    assert file["report"]["ignored_columns"] == ["intent"]
    told = [notice["code"] for notice in file["report"]["notices"]]
    assert told == ["label_ignored", "columns_ignored"]
    found = world.plan(method="lora", data=file["id"])["plan"]["notices"]
    assert [(one["code"], one["field"]) for one in found] == [(code, "data.train") for code in told]
    mapped = {"type": "file", "id": file["id"], "columns": {"prompt": "text", "completion": "intent"}}
    assert world.plan(method="lora", data={"train": mapped})["plan"]["notices"] == []


def test_a_plan_of_every_kind_of_slot(world: World) -> None:
    world.learn()
    world.node("plan-small", gpu("a", 8), gpu("b", 8), {"id": "prepare-0", "kind": "prepare"})
    world.node("plan-large", gpu("c", 192, "gfx942"))
    told = world.plan(method="auto", training={"max_length": 256})
    planned = told["plan"]
    assert told["spec"]["method"]["type"] == "auto" and told["spec"]["optimizer"]["learning_rate"] is None
    assert planned["fits"] and planned["reason"] is None and planned["parameters"] == SHAPE.parameters
    assert (planned["longest_row"], planned["longest_row_from"]) == (256, "max_length")
    large, small = sorted(planned["places"], key=lambda place: -place["memory_bytes"])
    assert (large["slots"], small["slots"]) == (["plan-large/0"], ["plan-small/0", "plan-small/0"])
    assert large["method"]["type"] == "lora" and small["method"]["rejected"][0]["rung"] == "full"
    assert {one["rung"] for one in large["method"]["rejected"]} == {"full", "full with gradient checkpointing"}
    assert "40 training rows are few" in large["method"]["rejected"][0]["reason"], "it would fit"
    for place in (large, small):
        kinds = {item["kind"]: item["bytes"] for item in place["bytes"]}
        assert place["fits"] and sum(kinds.values()) == place["peak_bytes"] < place["memory_bytes"]
        assert kinds["weights"] > 0 and {"optimizer", "slack"} <= kinds.keys()
        assert {item["kind"] for item in place["disk"]["bytes"]} >= {"checkpoints", "result"}
    # 40 rows, 8 a step, 3 epochs; nobody has counted tokens, and no run like it has ended: no time is made up.
    assert (planned["batch"]["steps"], planned["batch"]["per_step"]) == (15, 8)
    assert large["time"]["seconds"] is None and "preview" in large["time"]["reason"]
    assert planned["disk"]["free"] > 0


def test_without_nodes_there_are_still_bytes(world: World) -> None:
    world.learn()
    with world.api.database.write() as session:
        session.execute(delete(Node))
    (place,) = world.plan(method="lora")["plan"]["places"]
    assert place["slots"] == [] and place["peak_bytes"] > 0 and place["method"]["type"] == "lora"
    assert world.submit(method="full").status_code == 201


@pytest.mark.both_databases
def test_rows_and_times_are_from_what_was_counted_and_run(world: World) -> None:
    world.learn()
    world.node("plan-small", gpu("small", 24))
    spec = world.plan(method="qlora", training={"max_length": 256})["spec"]
    job_id = world.submit(method="qlora", training={"max_length": 256}).json()["id"]
    other = world.submit(method="lora", training={"max_length": 256}).json()["id"]
    preview = {"ok": True, "tokens": {"longest": 77}, "epoch": {"tokens": 1000}, "rows": {"used": 40}}
    own = {"project_id": _project(world, job_id), "owner_id": _owner(world, job_id)}
    with world.api.database.write() as session:
        values = {"kind": "preview", "status": "succeeded", "accelerator": "any", "resume_from": [], "spec": spec}
        session.execute(insert(Job).values(id="preview-" + "0" * 26, result=preview, **values, **own))
        for run, pace in ((job_id, 50.0), (other, 9999.0)):
            session.execute(
                update(Job)
                .where(Job.id == run)
                .values(status="succeeded", attempt=2, result={"tokens_per_second": pace})
            )
            record = {"environment": {"arch": "gfx1100"}}
            about = {"kind": "train", "node": "n", "worker": "w", "slot": "s", "run_record": record}
            session.execute(insert(Attempt).values(job_id=run, attempt=2, **about, **own))
    planned = world.plan(method="qlora", training={"max_length": 256})["plan"]
    assert (planned["longest_row"], planned["longest_row_from"]) == (77, "preview")
    time = planned["places"][0]["time"]
    assert (time["tokens"], time["tokens_per_second"], time["runs"]) == (3000, 50.0, 1)
    assert time["seconds"] == 60.0 and "1 finished run like it" in time["reason"]
    elsewhere = world.plan(method="qlora", training={"max_length": 128})["plan"]
    assert elsewhere["longest_row_from"] == "max_length" and elsewhere["places"][0]["time"]["seconds"] is None


def test_what_fits_no_node_is_refused_at_submit(world: World) -> None:
    world.learn()
    world.node("plan-small", gpu("small", 8))
    planned = world.plan(method="full")["plan"]
    assert not planned["fits"] and "`method: qlora`" in planned["reason"]
    (place,) = planned["places"]
    assert not place["fits"] and place["lacks"] and any("method: qlora" in way for way in place["would_fit"])
    assert place["adjusted"]["training.per_device_train_batch_size"] == 1 and "bytes are those" in place["notice"]
    error = world.submit(method="full").json()["error"]
    assert (error["code"], error["field"]) == ("fits_nowhere", "method") and error["message"] == planned["reason"]
    assert world.submit(method="qlora").status_code == 201
    job_id = world.submit(method="auto").json()["id"]
    with world.api.database.write() as session:  # a job that had settled on a box that is gone
        settled = {"rung": "full", "reason": "", "rejected": [], "spec": {"method": {"type": "full"}}}
        session.execute(update(Job).where(Job.id == job_id).values(status="failed", settled=settled))
    retried = world.http.post(f"/jobs/{job_id}/retry")
    assert (retried.status_code, retried.json()["error"]["code"]) == (422, "fits_nowhere")
    world.node("plan-large", gpu("large", 192))
    assert world.submit(method="full").status_code == 201
    again = world.http.post(f"/jobs/{job_id}/retry")
    assert again.status_code == 200 and again.json()["settled"]["rung"] == "full"


def test_a_session_whose_model_fits_no_node_is_refused_before_it_waits(world: World) -> None:
    """When it is opened where the model is known, else once it has been prepared: no slot is taken for it."""
    asked = {"model": MODEL, "resources": {"accelerator": "gpu"}}
    world.node("session-small", gpu("little", 2.4))
    unknown = world.http.post("/sessions", json=asked)
    assert unknown.status_code == 201, unknown.text
    with world.api.database.write() as session:
        job = session.execute(select(Job).where(Job.id == unknown.json()["id"])).scalar_one()
        refused = ready.ready(session, job, {"shape": SHAPE.as_dict()}, memory_check=True).refused
    assert refused is not None and refused.code == "fits_nowhere"
    for more, field, way in (
        ({}, "quantization", "What would fit: `quantization: nf4`"),
        ({"method": "full"}, "method", "`method: lora` and `quantization: nf4`"),
    ):
        error = world.http.post("/sessions", json=asked | more).json()["error"]
        assert (error["code"], error["field"]) == ("fits_nowhere", field), error
        assert "this session needs" in error["message"] and way in error["message"], error
    fits = world.http.post("/sessions", json=asked | {"quantization": "nf4"})
    assert fits.status_code == 201
    for opened in (unknown, fits):  # the next test wants the only job in the queue
        world.http.post(f"/sessions/{opened.json()['id']}/close").raise_for_status()


def test_modules_that_are_not_there_are_refused_at_submit(world: World) -> None:
    world = world
    world.learn()
    world.node("plan-large", gpu("large", 192))
    for path in ("/jobs", "/jobs?dry_run=true"):
        spec = {"model": MODEL, "data": world.file, "method": {"type": "lora", "target_modules": ["q_prj"]}}
        error = world.http.post(path, json=spec).json()["error"]
        assert error["field"] == "method.target_modules" and "q_proj" in error["message"]


def test_who_runs_it_can_switch_the_check_off(world: World, models: Path) -> None:
    world, local = world, str(models / "tiny")  # a folder that the API can see: nobody has to have prepared it
    world.node("plan-small", gpu("small", 0.001))
    row = _row(world, world.submit().json()["id"])
    actor = Actor(row.owner_id, row.project_id)
    sent = Submission(json.dumps({"model": local, "data": world.file}).encode(), "application/json", "/jobs")
    settings = Settings(data=str(world.api.root), model_roots=(models,), min_free_bytes=0)
    strict = Jobs(world.api.database, settings, world.api.layout)
    planned = strict.create(actor, sent, dry_run=True).body["plan"]
    assert planned["model_from"] == "the model's folder" and not planned["fits"]
    with pytest.raises(FitsNowhere):
        strict.create(actor, sent)
    lenient = Jobs(world.api.database, settings.model_copy(update={"memory_check": False}), world.api.layout)
    assert lenient.create(actor, sent).status == 201


def test_eft_plan(world: World, tmp_path: Path) -> None:
    world = world
    world.learn()
    world.node("plan-small", gpu("small", 8))
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"model": MODEL, "data": "rows.jsonl", "method": "auto"}))
    key = str(world.http.headers["authorization"]).removeprefix("Bearer ")
    environment = {"EFT_URL": world.api.url, "EFT_API_KEY": key, "HOME": str(tmp_path), "NO_COLOR": "1"}

    def eft(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [program(), "plan", str(tmp_path / "job.yaml"), *arguments]
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)

    told = eft()
    assert told.returncode == 0, told.stderr
    for words in ("plan-small/0", "method: auto is", "not full:", "checkpoints", "the bound of max_length"):
        assert words in told.stdout, told.stdout
    refused = eft("--set", "method=full", "--json")
    assert refused.returncode == 2, "it fits nowhere"
    assert json.loads(refused.stdout)["plan"]["fits"] is False


def _project(world: World, job_id: str) -> str:
    return str(_row(world, job_id).project_id)


def _owner(world: World, job_id: str) -> str:
    return str(_row(world, job_id).owner_id)


def _row(world: World, job_id: str) -> Job:
    with world.api.database.read() as session:
        row: Job | None = session.get(Job, job_id)
        assert row is not None
        return row


@pytest.mark.both_databases
def test_what_is_told_of_a_job_before_it_runs(world: World) -> None:
    """At a dry run and at submit the same: how pairs become tokens, few steps, a rate of another method."""
    world.learn()
    world.node("told", gpu("told", 80))

    def told(**axes: Any) -> dict[str, str]:
        asked = {"model": MODEL, "data": world.file, **axes}
        dry = world.http.post("/jobs?dry_run=true", json=asked).json()["notices"]
        job = world.http.post("/jobs", json=asked)
        assert job.status_code == 201, job.text
        assert job.json()["notices"] == dry
        world.http.post(f"/jobs/{job.json()['id']}/cancel")
        return {one["code"]: one["message"] for one in dry}

    few = told(batching={"type": "packed", "tokens_per_batch": 8192})
    assert set(few) == {"pairs", "few_steps"}
    assert "about 3 optimizer steps" in few["few_steps"] and "chat template" in few["pairs"]
    assert "15 optimizer steps" in told()["few_steps"]  # 40 rows, 8 a step, 3 epochs
    enough = told(
        training={"num_train_epochs": 4}, data={"train": world.file, "rendering": {"type": "model", "pairs": "newline"}}
    )
    assert set(enough) == {"pairs"} and "chat template" not in enough["pairs"]
    rate = told(method="auto", optimizer={"learning_rate": 1e-5}, training={"num_train_epochs": 4})
    words = rate["learning_rate_of_another_method"]
    assert "1e-05" in words and "`lora`" in words


def test_a_token_budget_that_is_left_out_looks_at_the_size_of_the_data(world: World) -> None:
    """40 short rows in batches of 8,192 tokens were three optimizer steps."""

    def asked(**axes: Any) -> dict[str, Any]:
        answer = world.http.post("/jobs?dry_run=true", json={"model": MODEL, "data": world.file, **axes})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    for kind in ("packed", "tokens"):
        assert asked(batching=kind)["spec"]["batching"]["tokens_per_batch"] == 64
    job = world.http.post("/jobs", json={"model": MODEL, "data": world.file, "batching": "packed"}).json()
    assert job["spec"]["batching"]["tokens_per_batch"] == 64, "what was told is what is stored"
    world.http.post(f"/jobs/{job['id']}/cancel")
    given = {"type": "packed", "tokens_per_batch": 8192}
    assert asked(batching=given)["spec"]["batching"] == {**given, "share_prompts": True}
    assert asked(batching="packed", training={"max_steps": 30})["spec"]["batching"]["tokens_per_batch"] == 8192
    lines = b"".join(b'{"prompt": "%d %s", "completion": "yes"}\n' % (n, b"word " * 200) for n in range(1000))
    jsonl = {"content-type": "application/jsonl"}
    large = world.http.post("/files", params={"filename": "large.jsonl"}, content=lines, headers=jsonl).json()["id"]
    assert asked(data=large, batching="packed")["spec"]["batching"]["tokens_per_batch"] == 7744
    assert (
        asked(data=large, batching="packed", training={"num_train_epochs": 10})["spec"]["batching"]["tokens_per_batch"]
        == 8192
    )
