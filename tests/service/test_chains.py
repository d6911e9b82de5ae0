"""Jobs that start from other jobs, on a real service: adapters continued and merged first, killed and resumed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load

from tests.support.service import Service, running, wait_for

ROWS = [{"prompt": f"say {n}", "completion": f" {n}"} for n in range(32)]
LORA = {"type": "lora", "r": 4, "lora_alpha": 12}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    environment = {"EFT_MODEL_ROOTS": str(models), "EFT_CPU_SLOTS": "2"}
    yield from running(tmp_path_factory.mktemp("chains"), environment)


@pytest.fixture(scope="module")
def rows(service: Service) -> str:
    path = service.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return service.upload(path)


@pytest.fixture(scope="module")
def parent(service: Service, models: Path, rows: str) -> str:
    job_id = service.submit(spec(str(models / "tiny"), rows, method=LORA))
    service.wait(job_id, "succeeded")
    return job_id


@pytest.fixture(scope="module")
def continued(service: Service, parent: str, rows: str) -> str:
    """A job that trains the parent's adapter further, undisturbed."""
    job_id = service.submit(spec(parent, rows, 40, checkpoint={"type": "disk", "save_steps": 5}))
    service.wait(job_id, "succeeded")
    return job_id


def spec(model: Any, rows: str, steps: int = 4, **axes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "data": rows,
        "optimizer": {"learning_rate": 1e-2},
        "training": {"max_steps": steps, "per_device_train_batch_size": 2, "max_length": 64},
        **axes,
    }


def adapter(service: Service, job_id: str) -> bytes:
    return service.artifact(job_id, "adapter/adapter_model.safetensors")


def losses(service: Service, job_id: str) -> list[float]:
    series = service.client.get(f"/jobs/{job_id}/metrics", params={"names": "loss"}).json()["loss"]
    return [value for _, value in series]


def test_an_adapter_is_continued_with_what_it_has_and_resumed_to_the_bit(
    service: Service, parent: str, continued: str, rows: str
) -> None:
    child = service.client.get(f"/jobs/{continued}").json()
    assert child["spec"]["model"] == {"type": "job", "id": parent, "adapter": "continue"}
    method = child["spec"]["method"]
    assert (method["type"], method["r"], method["lora_alpha"]) == ("lora", 4, 12), "taken over from the parent"
    assert losses(service, continued)[0] < losses(service, parent)[0], "it began where the parent ended"

    killed = service.submit(spec(parent, rows, 40, checkpoint={"type": "disk", "save_steps": 5}))
    found = service.data / "runs" / killed
    wait_for(
        lambda: next(found.glob("attempt-*/checkpoints/step-*/manifest.json"), None), 200, "its checkpoint",
        lambda: service.describe(killed),
    )  # fmt: skip
    for pid in service.trainers(killed):
        os.kill(pid, signal.SIGKILL)
    service.wait(killed, "succeeded")
    assert adapter(service, killed) == adapter(service, continued)

    config = json.loads(service.artifact(continued, "adapter/adapter_config.json"))
    base = json.loads(service.artifact(parent, "adapter/adapter_config.json"))
    assert config["base_model_name_or_path"] == base["base_model_name_or_path"]


def test_an_adapter_is_merged_first_and_the_merged_model_is_made_once(
    service: Service, parent: str, continued: str, rows: str
) -> None:
    model = {"type": "job", "id": parent, "adapter": "merge"}
    held_out = service.folder / "held-out-rows.jsonl"
    held_out.write_text(
        "".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(90, 98))
    )
    both = {"data": {"train": rows, "eval": service.upload(held_out)}}
    first = service.submit(spec(model, rows, method={"type": "qlora", "r": 2}, **both))
    full = service.submit(spec(parent, rows, method="full"))
    for job_id in (first, full):
        service.wait(job_id, "succeeded")
    assert len(list((service.data / "models" / "merged").glob("*/manifest.json"))) == 1, "one for both"
    assert service.client.get(f"/jobs/{full}").json()["spec"]["model"]["adapter"] == "merge"
    began = [losses(service, one)[0] for one in (full, continued)]
    assert began == pytest.approx([began[-1]] * 2, abs=2e-3), "merged (rounded to bf16) or beside: the same model"
    over = service.submit(spec({"type": "job", "id": first, "adapter": "merge"}, rows, 1, **both))
    service.wait(over, "succeeded")
    ended, goes_on = (service.job(one)["result"] for one in (first, over))
    assert ended["eval_after"]["eval_loss"] < ended["eval_before"]["eval_loss"] - 0.01
    same = pytest.approx(ended["eval_after"]["eval_loss"], abs=2e-3)
    assert goes_on["eval_before"]["eval_loss"] == same, "an adapter over packed weights, merged onto those"

    grandchild = service.submit(spec(full, rows))
    service.wait(grandchild, "succeeded")
    assert service.client.get(f"/jobs/{grandchild}").json()["spec"]["model"]["adapter"] is None
    assert losses(service, grandchild)[0] < began[0]

    asked = service.client.post(f"/files/{rows}/preview", json={"model": parent})
    assert asked.status_code in (200, 201, 202), asked.text
    path = f"/files/{rows}/previews/{asked.json()['id']}"
    preview = wait_for(
        lambda: (found := service.client.get(path).json())["status"] in ("succeeded", "failed") and found, 200,
        "the preview", lambda: service.client.get(path).text,
    )  # fmt: skip
    assert preview["status"] == "succeeded", preview

    told = service.client.get(f"/jobs/{grandchild}/lineage").json()["data"]
    assert [one["job"] for one in told] == [grandchild, full, parent]
    for one in told:
        assert one["spec_sha256"] and one["template_sha256"] and one["code"]["sha256"]
        assert len(one["data"]["train"]) == 1 and one["weights"]
    card = service.artifact(grandchild, "adapter/README.md").decode()
    assert "## Lineage" in card and full in card and parent in card
    record = json.loads(service.artifact(grandchild, "run_record.json"))
    assert [one["job"] for one in record["lineage"]] == [full, parent]

    refused = service.client.delete(f"/jobs/{parent}")
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "job_in_use", refused.text


def test_a_model_of_the_registry_is_trained_further_by_another_stage(service: Service, parent: str, rows: str) -> None:
    """sft, the registry, dpo: the adapter goes on, and its entry says where it comes from."""
    entry = service.client.get(f"/models/model-{parent[4:]}").json()
    assert (entry["stage"], entry["kind"], entry["parent"]) == ("sft", "adapter", None)
    pairs = service.folder / "registry-pairs.jsonl"
    pair = {"chosen": " yes", "rejected": " no"}
    pairs.write_text("".join(json.dumps(pair | {"prompt": f"say {n}"}) + "\n" for n in range(16)))
    child = service.submit(
        spec({"type": "registry", "id": entry["id"]}, service.upload(pairs), 2, stage="dpo", name="Preferred")
    )
    service.wait(child, "succeeded")
    assert losses(service, child)[0] == pytest.approx(math.log(2), abs=1e-3), "its reference is what it continues"
    made = service.client.get("/models/Preferred").json()
    assert (made["stage"], made["parent"], made["base"]) == ("dpo", entry["id"], entry["base"])
    lineage = service.client.get("/models/Preferred/lineage").json()["data"]
    assert [one["job"] for one in lineage] == [child, parent]
    listed = {one["path"]: one for one in service.client.get("/models/Preferred/files").json()["data"]}
    weights = service.client.get(listed["adapter/adapter_model.safetensors"]["url"]).content
    assert weights == adapter(service, child) != adapter(service, parent)


def test_a_format_is_made_after_the_training_without_a_training_slot(service: Service, parent: str) -> None:
    model = f"/models/model-{parent[4:]}"
    brief = {"export": ["merged", "torchao_int8", "torchao_int4"], "max_runtime_seconds": 1}  # merged alone takes less
    url = service.client.post(f"{model}/exports", json=brief).json()["links"]["self"]
    failed = wait_for(
        lambda: (one := service.client.get(url).json())["status"] in ("succeeded", "failed") and one, 200,
        "the export to end", lambda: service.client.get(url).text,
    )  # fmt: skip
    assert (failed["status"], failed["failure"]["code"]) == ("failed", "max_runtime"), failed
    assert "max_runtime_seconds = 1" in failed["failure"]["message"]
    made = service.client.post(f"{model}/exports", json={"export": ["merged"]})
    assert made.status_code == 201, made.text
    again = service.client.post(f"{model}/exports", json={"export": [{"type": "merged", "dtype": "fp32"}]})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "exported_already")
    url = made.json()["links"]["self"]
    found = wait_for(
        lambda: (one := service.client.get(url).json())["status"] in ("succeeded", "failed") and one, 200,
        "the export", lambda: service.client.get(url).text,
    )  # fmt: skip
    assert found["status"] == "succeeded" and found["result"][0]["released"], found
    kept = found["result"][0]["retention"]
    formats = {one["folder"]: one for one in service.client.get(model).json()["formats"]}
    assert formats["merged"]["released"] and formats["merged"]["retention"] == kept["retention"]
    files = {one["path"]: one for one in service.client.get(f"{model}/files").json()["data"]}
    content = service.client.get(files["merged/model.safetensors"]["url"]).content
    assert hashlib.sha256(content).hexdigest() == files["merged/model.safetensors"]["sha256"]
    assert formats["merged"]["bytes"] >= len(content)
    card = service.client.get(files["merged/README.md"]["url"]).text
    assert "## What the exported formats have kept" in card
    record = service.client.get(f"/jobs/{parent}").json()
    assert record["result"].get("export") in (None, []), "the job itself stays as it ended"
    assert parent in {one["id"] for one in service.client.get("/jobs").json()["data"]}
    assert found["id"] not in {one["id"] for one in service.client.get("/jobs").json()["data"]}


def test_what_cannot_be_gone_on_from_is_refused_with_the_way_out(service: Service, parent: str, rows: str) -> None:
    def post(**given: Any) -> tuple[int, dict[str, Any]]:
        answer = service.client.post("/jobs", json=spec(**{"model": parent, "rows": rows} | given))
        return answer.status_code, answer.json()["error"]

    status, error = post(model="job-00000000000000000000000000")
    assert (status, error["field"]) == (404, "model.id")
    status, error = post(method={"type": "lora", "r": 8})
    assert (status, error["code"], error["field"]) == (422, "adapter_differs", "method.r")
    assert "`4`" in error["message"]
    status, error = post(model={"type": "job", "id": parent, "adapter": "continue"}, method="full")
    assert (status, error["code"]) == (422, "adapter_not_trained")
    waiting = service.submit(spec(parent, rows, 100_000))
    status, error = post(model=waiting)
    assert (status, error["code"]) == (422, "model_job_not_succeeded")
    assert service.client.delete(f"/jobs/{parent}").status_code == 409
    service.client.post(f"/jobs/{waiting}/cancel")
    service.wait(waiting, "cancelled")


def test_weights_that_have_changed_since_are_not_trained_on(service: Service, continued: str, rows: str) -> None:
    (path,) = (service.data / "runs" / continued).glob("attempt-*/artifacts/adapter/adapter_model.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    child = service.submit(spec(continued, rows, 1))
    failure = service.wait(child, "failed")["failure"]
    path.write_bytes(whole)  # later tests compare with it
    assert failure["code"] == "model_job_changed" and failure["field"] == "model.id"


def test_a_pipeline_goes_on_by_itself_though_its_worker_and_api_are_killed(
    service: Service, models: Path, rows: str
) -> None:
    """Between its steps: the second one is there once, whoever comes back first. The chain is sft, dpo, reward."""
    pair, files = {"chosen": " yes", "rejected": " no"}, []
    for name, count in (("pairs", 16), ("held-out", 4)):
        path = service.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(pair | {"prompt": f"say {count + n}"}) + "\n" for n in range(count)))
        files.append(service.upload(path))
    plain = {name: value for name, value in spec("", rows, 2).items() if name != "model"}
    judged = plain | {"data": {"train": files[0], "eval": files[1]}}
    steps: list[dict[str, Any]] = [
        {"name": "first", "job": {"model": str(models / "tiny"), "method": LORA, **plain}},
        {"name": "second", "job": {**judged, "model": {"adapter": "continue"}, "stage": "dpo"}},
        {"name": "third", "job": {**judged, "stage": "reward"}},
    ]
    steps[0]["gates"] = [{"metric": "train_loss", "max": 100}]
    steps[1]["gates"] = [{"metric": "eval_rewards/accuracies", "min": 0.9}]
    steps[2]["gates"] = [{"metric": "eval_accuracy", "min": 0.9}]
    document = {"name": "chain", "steps": steps}
    wrong = {**document, "steps": [steps[0], {"name": "second", "job": {**plain, "method": {"type": "lora", "r": 3}}}]}
    refused = service.client.post("/pipelines", json=wrong)
    assert refused.status_code == 422 and refused.json()["error"]["field"] == "steps.1.job.method.r", refused.text
    typo = {**document, "steps": [{**steps[0], "gates": [{"metric": "eval_los", "max": 1}]}, steps[1]]}
    refused = service.client.post("/pipelines", json=typo)
    assert refused.status_code == 422 and refused.json()["error"]["code"] == "gate_without_figure", refused.text
    checked = service.client.post("/pipelines", params={"dry_run": "true"}, json=document).json()
    assert [one["job"]["method"]["r"] for one in checked["steps"]] == [4, 4, 4], "taken over from the step before"

    headers = {"Idempotency-Key": "chain-1"}
    made = service.client.post("/pipelines", json=document, headers=headers)
    assert made.status_code == 201, made.text
    again = service.client.post("/pipelines", json=document, headers=headers)
    assert again.json()["id"] == made.json()["id"] and again.headers["idempotency-replayed"] == "true"
    pipeline_id, first = made.json()["id"], made.json()["steps"][0]["job"]

    service.wait(first, "running", "succeeded")
    for name in ("worker", "api"):
        os.kill(service.pid(name), signal.SIGKILL)

    def ended() -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = service.client.get(f"/pipelines/{pipeline_id}").json()
        except httpx.TransportError:
            return None  # the API is coming back
        return found if found.get("status") not in (None, "running") else None

    found = wait_for(ended, 200, "its end", lambda: service.describe(first))
    assert found["status"] == "succeeded", found
    jobs = [step["job"] for step in found["steps"]]
    assert jobs[0] == first and len(set(jobs)) == 3
    assert [step["gates"][0]["passed"] for step in found["steps"]] == [True] * 3
    assert losses(service, jobs[1])[0] == pytest.approx(math.log(2), abs=1e-3), "its reference is what it continues"
    listed = service.client.get("/jobs", params={"limit": 100}).json()["data"]
    assert [job["id"] for job in listed if job["id"] > first and job["retry_of"] is None] == jobs[:0:-1]
    told = service.client.get(f"/pipelines/{pipeline_id}/events", params={"format": "json"}).json()["data"]
    assert [one["type"] for one in told] == ["status", *["step"] * 3, "status"]
    with service.client.stream("GET", f"/pipelines/{pipeline_id}/events") as stream:
        text = stream.read().decode()
    assert text.endswith('event: end\ndata: {"status":"succeeded"}\n\n')
    lineage = service.client.get(f"/jobs/{jobs[2]}/lineage").json()["data"]
    assert [one["job"] for one in lineage] == jobs[::-1]
    assert {one["pipeline"] for one in lineage} == {pipeline_id}
    parts = load(adapter(service, jobs[2]))
    assert {"base_model.model.score.weight"} == {name for name in parts if "lora" not in name}, "a head beside adapters"
    unlike = load(adapter(service, jobs[1]))
    assert parts.keys() - unlike.keys() == {"base_model.model.score.weight"}


def test_what_was_made_elsewhere_is_trained_like_what_a_job_made(
    service: Service, parent: str, continued: str, models: Path, rows: str, tmp_path: Path
) -> None:
    """Uploads of the base and of the parent's adapter: the same weights, to the bit, as from the folder and the job."""

    def upload(folder: Path, **fields: str) -> str:
        files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir()) if path.is_file()]
        reply = service.client.post("/models", files=files, data=fields)
        assert reply.status_code == 201, reply.text
        return str(reply.json()["id"])

    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):  # its tokenizer is that of its base
        (folder / file).write_bytes(service.artifact(parent, f"adapter/{file}"))
    base = upload(models / "tiny")
    made = upload(folder, base=base)
    over = {"type": "registry", "id": made}
    ours = service.submit(spec(over, rows, 40, checkpoint={"type": "disk", "save_steps": 5}))
    again = service.submit(spec(base, rows, method=LORA))
    for job_id in (ours, again):
        service.wait(job_id, "succeeded")
    assert adapter(service, ours) == adapter(service, continued)
    assert adapter(service, again) == adapter(service, parent)
    shown = service.client.get(f"/models/model-{ours.removeprefix('job-')}").json()
    assert shown["parent"] == made
    assert service.client.delete(f"/models/{base}").json()["error"]["code"] == "model_in_use"
