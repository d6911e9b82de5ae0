"""Models over `/v1` by OpenAI's client (docs/serving.md): answers of PEFT, streams, kills, a slot left to jobs."""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from core.train.tools.install import install
from tests.support.service import Service, running, wait_for
from tests.support.tools import CACHE, lm_eval_tools

if TYPE_CHECKING:
    import openai  # a third of a second, which not every process of pytest that reads this file needs

IDLE = 10
"""Seconds without requests after which a process leaves."""
SCORES, SAMPLES = "scores.json", "samples.jsonl"
ASKED = [{"role": "user", "content": "turn on the light"}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("serving")
    environment = {
        "EFT_MODEL_ROOTS": str(models),
        "EFT_SERVING_IDLE_SECONDS": str(IDLE),
        "EFT_LM_EVAL_TASKS": str(folder / "tasks"),
    }
    with contextmanager(running)(folder, environment, settle=0) as service:
        tools = service.data / "cache" / "tools"
        tools.parent.mkdir(exist_ok=True)
        lm_eval_tools()
        install("tensorboard", CACHE, offline=False, field="tracking")
        tools.symlink_to(CACHE / "tools")
        yield service


def spec(service: Service, models: Path, name: str, **more: Any) -> dict[str, Any]:
    rows = service.folder / "rows.jsonl"
    turns = [*ASKED, {"role": "assistant", "content": "light on"}]
    rows.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(8)))
    return {
        "name": name,
        "model": str(models / "tiny"),
        "data": service.upload(rows),
        "method": {"type": "lora", "r": 4, "lora_alpha": 16},
        "optimizer": {"learning_rate": 0.1},
        "training": {"max_steps": 3, "precision": "fp32"},
        "checkpoint": {"save_steps": 1, "keep_last": 3},
        "resources": {"accelerator": "cpu"},
    } | more


@pytest.fixture(scope="module")
def tuned(service: Service, models: Path) -> str:
    job = service.submit(spec(service, models, "lights", tracking=["tensorboard"]))
    assert service.wait(job, "succeeded", "failed")["status"] == "succeeded", service.describe(job)
    return job


@pytest.fixture(scope="module")
def client(service: Service) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{service.note()['url']}/v1", api_key=service.key, max_retries=0, timeout=120)


def children(service: Service) -> list[int]:
    return [pid for pid, command in service.processes().items() if "-m core.train.serving" in command]


@functools.cache
def loaded(models: Path, adapter: Path | None) -> tuple[Any, Any]:
    """Tokenizer and model as transformers and PEFT read them."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(models / "tiny", dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    return AutoTokenizer.from_pretrained(models / "tiny"), model


def peft_text(models: Path, adapter: Path | None, tokens: int) -> str:
    import torch

    tokenizer, model = loaded(models, adapter)
    text = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_openais_client_gets_pefts_answers(service: Service, client: openai.OpenAI, tuned: str, models: Path) -> None:
    """Base, model, job and checkpoint, at once and one by one, whole and streamed, with one seed."""
    greedy: dict[str, Any] = {"messages": ASKED, "temperature": 0, "max_tokens": 24, "logprobs": True}
    found: dict[str, Any] = {}
    names = ["lights", tuned, "lights@base", "lights@2", str(models / "tiny")]

    def ask(name: str) -> None:
        found[name] = client.chat.completions.create(model=name, **greedy)

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(names), service.log()
    assert len(children(service)) == 1, "adapters and base share a process"
    texts = {name: found[name].choices[0].message.content for name in names}
    (adapter,) = (service.data / "runs" / tuned).glob("attempt-*/artifacts/adapter")
    assert texts["lights"] == texts[tuned] == peft_text(models, adapter, 24)
    assert texts["lights@base"] == texts[str(models / "tiny")] == peft_text(models, None, 24)
    assert texts["lights"] != texts["lights@base"]
    three = [found[name].choices[0].logprobs.content[0].logprob for name in ("lights", "lights@base", "lights@2")]
    assert len(set(three)) == 3
    usage = found["lights"].usage
    assert usage.prompt_tokens > 5 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    parts = list(
        client.chat.completions.create(
            model="lights", **greedy, stream=True, stream_options={"include_usage": True}, top_logprobs=2
        )
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts[:-1]) == texts["lights"]
    assert len(parts) > 5 and parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage == usage and not parts[-1].choices
    logprobs = [one for part in parts[:-1] if part.choices[0].logprobs for one in part.choices[0].logprobs.content]
    assert len(logprobs) == usage.completion_tokens
    assert all(one.logprob == one.top_logprobs[0].logprob for one in logprobs), "greedy takes the likeliest"

    drawn: dict[str, Any] = {"model": "lights", "prompt": "light", "max_tokens": 8, "seed": 5, "n": 2, "logprobs": 1}
    first, second = client.completions.create(**drawn), client.completions.create(**drawn)
    assert [one.text for one in first.choices] == [one.text for one in second.choices]
    assert first.choices[0].text != first.choices[1].text
    assert len(first.choices[0].logprobs.tokens) == len(first.choices[0].logprobs.token_logprobs)
    echoed = client.completions.create(model="lights", prompt="light", max_tokens=4, temperature=0, echo=True)
    assert echoed.choices[0].text.startswith("light")
    listed = [model.id for model in client.models.list()]
    assert listed == ["lights", str(models / "tiny")]
    assert client.models.retrieve("lights@last").id == "lights@last"
    with service.client.stream("POST", "/v1/completions", json=drawn | {"stream": True}) as reply:
        assert reply.read().endswith(b"data: [DONE]\n\n")


def test_a_tracker_is_shown_the_curve_and_leaves(service: Service, tuned: str) -> None:
    """What it has of each point, and after kills: tests/unit/test_tracking.py."""
    (written,) = (service.data / "tracking" / "tensorboard" / "eft" / f"lights {tuned}").iterdir()
    (run,) = (path.parent for path in (service.data / "runs" / tuned).glob("attempt-*/tracking-tensorboard.json"))

    def gone() -> bool:
        return not [words for words in service.processes().values() if "tracking-tensorboard.json" in words]

    wait_for(gone, 120, "the tracker's end")
    assert written.read_bytes().count(b"learning_rate") == 3, "a point for each step"
    assert (run / "tracking-tensorboard.log").read_text().count("Error") == 0
    told = service.client.get(f"/jobs/{tuned}/events", params={"format": "json"}).json()["data"]
    assert not [event for event in told if event["data"].get("code") == "tracking_failed"]


TASK = """
task: lights
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["light on", "light off", "who"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def from_outside(service: Service, models: Path, folder: Path, place: Path) -> dict[str, Any]:
    """Scores of the task `lights` below `folder` by the harness over HTTP: as the command `lm-eval run` does, which
    reads the thousands of files of its own tasks first. In a fork of this process, which has torch and transformers."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        try:
            with (place / "log.txt").open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os.environ |= {"HOME": str(place), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": service.key}
            os.chdir(place)
            sys.path.insert(0, str(lm_eval_tools().folder))
            evaluate = importlib.import_module("lm_eval").simple_evaluate
            tasks = importlib.import_module("lm_eval.tasks").TaskManager
            model = f"model=lights,base_url={service.note()['url']}/v1/completions,tokenizer={models / 'tiny'}"
            found = evaluate(
                "local-completions",
                model_args=f"{model},num_concurrent=2",
                tasks=["lights"],
                task_manager=tasks(include_path=str(folder), include_defaults=False),
            )
            (place / SCORES).write_text(json.dumps(found["results"]["lights"]))
            lines = (json.dumps(one, default=str) + "\n" for one in found["samples"]["lights"])
            (place / SAMPLES).write_text("".join(lines))
        except BaseException:
            traceback.print_exc(file=(place / "error.txt").open("w"))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (place / SAMPLES).exists(), "".join(path.read_text()[-3000:] for path in place.glob("*.txt"))
    scores: dict[str, Any] = json.loads((place / SCORES).read_text())
    return scores


def test_lm_eval_scores_a_served_model_and_an_export_the_same(
    service: Service, tuned: str, models: Path, tmp_path: Path
) -> None:
    """EleutherAI's harness over data of ours: from outside against `/v1`, and as an export over the folders that are
    handed back. Both find PEFT's log-probabilities."""
    folder = service.folder / "tasks"
    questions = write_task(folder)
    scores = from_outside(service, models, folder, tmp_path)
    (adapter,) = (service.data / "runs" / tuned).glob("attempt-*/artifacts/adapter")
    right = assert_peft_scores(tmp_path / SAMPLES, models, adapter)
    assert scores["acc,none"] == right / len(questions)

    url = f"/models/model-{tuned.removeprefix('job-')}/exports"
    asked = service.client.post(url, json={"export": [{"type": "lm_eval", "task": "lights"}]})
    assert asked.status_code == 201, asked.text

    def ended() -> Any:
        told = service.client.get(f"{url}/{asked.json()['id']}").json()
        return told if told["status"] in ("succeeded", "failed") else None

    (outcome,) = wait_for(ended, 300, "the export")["result"]
    assert outcome["released"] and outcome["rows"] == len(questions), outcome
    assert outcome["scores"]["acc,none"] == right / len(questions)
    written = next((service.data / "runs" / asked.json()["id"]).glob("attempt-*/artifacts/lm-eval-lights"))
    assert_peft_scores(written / SAMPLES, models, adapter)
    assert "| lights | acc,none |" in (written / "README.md").read_text()


def write_task(folder: Path) -> list[str]:
    """A task with a row for each of the questions, which are returned."""
    questions = ["turn on the light", "lights, please"]
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": one}) + "\n" for one in questions))
    (folder / "lights.yaml").write_text(TASK.replace("DATA", str(folder / "rows.jsonl")))
    return questions


def assert_peft_scores(samples: Path, models: Path, adapter: Path) -> int:
    """How many of the answers were right."""
    right = 0
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        scores = [float(one[0][0]) for one in sample["resps"]]
        ours = peft_scores(models, adapter, sample["doc"]["question"], [" light on", " light off", " who"])
        assert scores == pytest.approx(ours, abs=1e-3)
        right += ours.index(max(ours)) == 0
    return right


def peft_scores(models: Path, adapter: Path, question: str, answers: list[str]) -> list[float]:
    """Log-probability of each answer after the question."""
    import torch

    tokenizer, model = loaded(models, adapter)
    start, found = len(tokenizer(question, add_special_tokens=False)["input_ids"]), []
    for answer in answers:
        ids = tokenizer(question + answer, add_special_tokens=False, return_tensors="pt")["input_ids"]
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), dim=-1)
        found.append(float(logprobs.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    return found


def test_what_cannot_be_asked_is_refused_in_openais_words(client: openai.OpenAI, tuned: str) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nothing", messages=ASKED)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    bad: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 3}, "temperature"),
        ({"n": 99}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": []}, "messages"),
    ]
    for more, field in bad:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{"model": "lights", "messages": ASKED} | more)
        assert refused.value.param == field, (more, refused.value.body)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="eft_wrong").models.list()


def long(client: openai.OpenAI, **more: Any) -> Any:
    wanted = {"model": "lights@base", "prompt": "a", "temperature": 0, "max_tokens": 120, "stream": True}
    return client.completions.create(**wanted | more)


def test_a_kill_ends_a_stream_with_an_error_and_a_whole_answer_is_made_again(
    service: Service, client: openai.OpenAI, tuned: str
) -> None:
    import openai

    expected = long(client, stream=False).choices[0].text
    stream = long(client, n=8, temperature=1.0)
    next(stream)
    (child,) = children(service)
    os.kill(child, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(openai.APIError) as broken:
        list(stream)
    assert "broke off" in str(broken.value) and time.monotonic() - began < 20
    results: list[str] = []
    asking = threading.Thread(target=lambda: results.append(long(client, stream=False).choices[0].text))
    asking.start()
    time.sleep(0.1)
    os.kill(service.pid("worker"), signal.SIGKILL)
    asking.join(60)
    assert results == [expected]


def test_a_job_has_its_slot_at_once_and_the_next_request_waits_for_it(
    service: Service, client: openai.OpenAI, tuned: str, models: Path
) -> None:
    assert long(client, stream=False).choices
    serving = children(service)
    job = service.submit(spec(service, models, "urgent", priority=-100))
    wait_for(lambda: service.job(job)["status"] not in ("queued", "preparing"), 30, "the job to start", every=0.05)
    assert not set(serving) & set(children(service))
    events = service.client.get(f"/jobs/{job}/events", params={"format": "json", "limit": 100}).json()["data"]
    at = {one["data"]["to"]: one["time"] for one in events if one["type"] == "status"}
    waited = datetime.fromisoformat(at["starting"]) - datetime.fromisoformat(at["queued"])
    assert waited.total_seconds() < IDLE, "it left for the job, not since nobody asked"
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(long(client, stream=False)))
    asking.start()
    assert service.client.post(f"/jobs/{job}/cancel").status_code == 200
    asking.join(60)
    assert answers and answers[0].choices, "asked while the job had the slot"
    wait_for(lambda: not children(service), 40, "the process to leave, since nobody asks it", every=0.3)
