"""`method: qlora` on a real service: from POST, with the rows of a hub's data set, to a merged model that plain
transformers loads; and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.eft_forks import program
from tests.support.hub import Hub, serving
from tests.support.service import Service, running

TRAINING = {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 64}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """What huggingface_hub, in the child that prepares a job, takes for the hub."""
    with serving() as state:
        state.repo, state.kind = "team/numbers", "dataset"
        rows = [json.dumps({"question": f"say {n}", "answer": f" {n}"}).encode() + b"\n" for n in range(24)]
        state.files = {
            "README.md": b"# never read",
            "main/train-00000.jsonl": b"".join(rows[:14]),
            "main/train-00001.jsonl": b"".join(rows[14:]),
            "loader.py": b"raise SystemExit('code of the data set ran')",
        }
        yield state


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path, hub: Hub) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("qlora")
    environment = {"EFT_MODEL_ROOTS": f"{models}:{folder}", "HF_ENDPOINT": hub.url, "NO_PROXY": "*"}
    yield from running(folder, environment)


@pytest.fixture(scope="module")
def file(service: Service) -> str:
    return upload(service, "train.jsonl", range(24))


def upload(service: Service, name: str, numbers: range) -> str:
    rows = service.folder / name
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in numbers))
    return service.upload(rows)


def test_from_post_to_a_merged_model(service: Service, models: Path, hub: Hub, tmp_path: Path) -> None:
    columns = {"prompt": "question", "completion": "answer"}
    spec: dict[str, Any] = {
        "model": str(models / "tiny"),
        "data": {
            "train": {"type": "hub", "id": hub.repo, "columns": columns},
            "eval": upload(service, "held.jsonl", range(24, 30)),
        },
        "method": "qlora",
        "export": "merged",
        "training": TRAINING,
    }
    job_id = service.submit(spec)
    job = service.wait(job_id, "succeeded", "failed")
    assert job["status"] == "succeeded", service.describe(job_id)
    assert job["spec"]["quantization"] == {"type": "nf4", "double": True, "skip_modules": []}
    (outcome,) = job["result"]["export"]
    assert outcome["released"] and outcome["check"]["distance"] <= outcome["check"]["tolerance"]
    assert job["result"]["eval_after"]["eval_loss"] > 0

    clean = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    environment = clean | {"EFT_URL": service.note()["url"], "EFT_API_KEY": service.key}
    line = [program(), "download", job_id, "merged", "adapter", "--output", str(tmp_path)]
    subprocess.run(line, env=environment, check=True, capture_output=True, timeout=250)
    # Imported here: every process of the suite would load them, and start all its children from under them.
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    AutoTokenizer.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(models / "tiny")
    dense: Any = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad():
        gap = (merged(ids).logits - dense(ids).logits).norm() / dense(ids).logits.norm()
    assert 0 < gap < 0.3, "the same model but for the packing"

    again = service.submit(spec)  # reads what the first job has packed
    assert service.wait(again, "succeeded", "failed")["status"] == "succeeded", service.describe(again)
    records = [json.loads(service.artifact(one, "run_record.json")) for one in (job_id, again)]
    assert [record["quantization"]["source"] for record in records] == ["quantised", "cache"]
    train = records[0]["data"]["train"]
    assert (train["rows"], train) == (24, records[1]["data"]["train"])
    assert f"`{hub.repo}` at commit `{hub.commit[:12]}`" in service.artifact(job_id, "adapter/README.md").decode()
    (source,) = train["sources"]
    assert (source["id"], source["commit"]) == (hub.repo, hub.commit)
    downloads = [line for line in hub.seen if line.startswith("GET") and ".jsonl" in line]
    assert len(downloads) == 2 and not hub.asked("loader.py"), "each file once, for both jobs; and nobody's code"
    assert service.artifact(job_id, "adapter/adapter_model.safetensors") == service.artifact(
        again, "adapter/adapter_model.safetensors"
    )


def test_what_is_refused_at_the_door_and_in_the_job(service: Service, models: Path, file: str) -> None:
    spec: dict[str, Any] = {"model": str(models / "tiny"), "data": file, "training": TRAINING}
    for axes, code, field in (
        ({"method": "full", "quantization": "nf4"}, "full_over_packed", "quantization"),
        ({"method": "qlora", "quantization": "none"}, "qlora_over_dense", "quantization"),
        ({"method": "full", "export": "merged"}, "nothing_to_merge", "export"),
    ):
        reply = service.client.post("/jobs", json=spec | axes)
        assert reply.status_code == 422, reply.text
        assert (reply.json()["error"]["code"], reply.json()["error"]["field"]) == (code, field)

    gptq = Path(shutil.copytree(models / "tiny", service.folder / "gptq"))
    config = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    job = service.wait(service.submit(spec | {"model": str(gptq), "method": "qlora"}), "failed", "succeeded")
    assert job["failure"]["code"] == "model_quantized" and "gptq" in job["failure"]["message"], job
