"""Jobs whose answers are scored by the reward model of another job, on a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eft import Client
from eft.jobfile import read_job, upload_data, uploader

from tests.support.rewards import margins
from tests.support.service import Service, running, wait_for
from tests.support.trainer import ROOT

TRAINING = {"max_steps": 2, "per_device_train_batch_size": 4, "max_length": 96}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    environment = {"EFT_MODEL_ROOTS": str(models), "EFT_CPU_SLOTS": "2"}
    yield from running(tmp_path_factory.mktemp("reward-models"), environment)


def upload(service: Service, name: str, rows: list[Any]) -> str:
    path = service.folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return service.upload(path)


@pytest.fixture(scope="module")
def tiny(models: Path) -> str:
    return str(models / "tiny")


@pytest.fixture(scope="module")
def reward_job(service: Service, tiny: str) -> dict[str, Any]:
    return {
        "name": "taste", "model": tiny, "data": upload(service, "margins", margins(8)), "stage": "reward",
        "training": TRAINING, "optimizer": {"learning_rate": 5e-3},
    }  # fmt: skip


@pytest.fixture(scope="module")
def prompts(service: Service) -> str:
    return upload(service, "prompts", [{"prompt": f"say a letter, number {n}", "reference": str(n)} for n in range(4)])


def grpo(tiny: str, prompts: str, model: Any) -> dict[str, Any]:
    stage = {
        "type": "grpo", "num_generations": 2, "max_completion_length": 6, "force": True,
        "reward": [{"type": "length", "most": 4}, {"type": "model", "model": model, "weight": 0.5}],
    }  # fmt: skip
    return {"model": tiny, "data": {"train": prompts}, "stage": stage, "training": TRAINING}


@pytest.fixture(scope="module")
def reward_model(service: Service, reward_job: dict[str, Any]) -> str:
    job_id = service.submit(reward_job)
    service.wait(job_id, "succeeded")
    return job_id


def test_a_job_is_scored_by_the_model_of_another_and_needs_it(
    service: Service, tiny: str, prompts: str, reward_model: str
) -> None:
    document = grpo(tiny, prompts, {"type": "job", "id": "taste"})
    plan = service.client.post("/jobs", params={"dry_run": True}, json=document).json()
    place = plan["plan"]["places"][0]
    assert [item for item in place["bytes"] if item["kind"] == "reward models"], place["bytes"]
    elsewhere = grpo(tiny, prompts, {"type": "hub", "id": "team/never-prepared"})
    plan = service.client.post("/jobs", params={"dry_run": True}, json=elsewhere).json()["plan"]
    assert plan["model_from"].endswith("reward models that were never prepared here: `model`")
    waiting = service.submit(document | {"resources": {"accelerator": "gpu"}})
    refused = service.client.delete(f"/jobs/{reward_model}")
    assert refused.status_code == 409 and f"the answers of `{waiting}` are scored by" in refused.text
    assert service.client.post(f"/jobs/{waiting}/cancel").status_code in (200, 202)

    job_id = service.submit(document)
    assert service.job(job_id)["spec"]["stage"]["reward"][1]["model"]["id"] == reward_model
    service.wait(job_id, "succeeded")
    answers = service.client.get(f"/jobs/{job_id}/rollouts").json()["data"]
    assert len({one["rewards"]["model"] for one in answers}) > 1
    told = service.client.get(f"/jobs/{job_id}/lineage").json()["data"][0]
    (scored_by,) = told["reward_models"]
    assert (scored_by["reward"], scored_by["job"]) == ("model", reward_model)
    assert "adapter/adapter_model.safetensors" in scored_by["weights"]
    card = service.artifact(job_id, "adapter/README.md").decode()
    assert f"- `model`: `{reward_model}`, weights" in card


def test_rewards_of_a_reward_model_can_be_tried(service: Service, tiny: str, prompts: str, reward_model: str) -> None:
    asked = service.client.post("/rewards/try", json=grpo(tiny, prompts, reward_model))
    assert asked.status_code in (200, 201, 202), asked.text
    path = f"/rewards/try/{asked.json()['id']}"
    found = wait_for(
        lambda: (now := service.client.get(path).json())["status"] in ("succeeded", "failed") and now, 200,
        "the trial", lambda: service.client.get(path).text,
    )  # fmt: skip
    assert found["status"] == "succeeded", found
    assert found["result"]["rewards"]["model"]["std"] > 0


def test_what_is_no_reward_model_is_refused_with_the_field(
    service: Service, tiny: str, prompts: str, reward_job: dict[str, Any], reward_model: str
) -> None:
    sft = service.submit(
        {"model": tiny, "data": upload(service, "rows", [{"prompt": "a", "completion": "b"}]), "training": TRAINING}
    )
    waiting = service.submit(reward_job | {"name": "later", "resources": {"accelerator": "gpu"}})
    service.wait(sft, "succeeded")
    for model, status, code in (
        ("job-" + "0" * 26, 404, "not_found"),
        ({"type": "registry", "id": "nobodys"}, 404, "not_found"),
        (waiting, 422, "model_job_not_succeeded"),
        (sft, 422, "not_a_reward_model"),
    ):
        refused = service.client.post("/jobs", json=grpo(tiny, prompts, model))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (status, code), refused.text
        assert error["field"] == "stage.reward.1.model.id"
    adapter = {"type": "job", "id": reward_model, "adapter": "merge"}
    refused = service.client.post("/jobs", json=grpo(tiny, prompts, adapter))
    assert refused.status_code == 422 and "is used as it is" in refused.text
    failed = service.submit(grpo(tiny, prompts, {"type": "local", "path": tiny}))
    service.wait(failed, "failed")
    assert service.job(failed)["failure"]["code"] == "not_a_reward_model"


def test_the_pipeline_of_the_examples_trains_a_reward_model_and_then_on_its_scores(service: Service, tiny: str) -> None:
    path = ROOT / "examples" / "reward-model.yaml"
    with Client(service.note()["url"], service.key) as client:
        document, folder = read_job(str(path))
        for step in document["steps"]:
            step["job"] = upload_data(step["job"] | {"model": tiny}, folder, {}, uploader(client))
            step["job"]["training"] |= {"max_steps": 2}
    first, second = document["steps"]
    reward = [{"type": "model", "model": {"step": "nobody"}}]
    wrong = second | {"job": second["job"] | {"stage": second["job"]["stage"] | {"reward": reward}}}
    refused = service.client.post("/pipelines", json=document | {"steps": [first, wrong]}).json()["error"]
    assert (refused["code"], refused["field"]) == ("unknown_step", "steps.1.job.stage.reward.0.model.step")
    made = service.client.post("/pipelines", json=document)
    assert made.status_code == 201, made.text
    place = f"/pipelines/{made.json()['id']}"
    ended = wait_for(
        lambda: (now := service.client.get(place).json())["status"] in ("succeeded", "failed") and now, 200,
        "the pipeline", lambda: service.client.get(place).text,
    )  # fmt: skip
    assert ended["status"] == "succeeded", ended
    taste, answers = (step["job"]["id"] if isinstance(step["job"], dict) else step["job"] for step in ended["steps"])
    assert service.job(answers)["spec"]["stage"]["reward"][0]["model"]["id"] == taste
