"""Whole runs on a tiny model: what comes out, what is refused and in which words."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.errors import ModelError
from core.spec.axes.method import Full, LoRA
from core.spec.run.exit_codes import EXIT_FAILED, EXIT_OK
from core.train.entry.ask import ask
from core.train.export.handed_back import ArtifactsDiffer, check_saved
from core.train.export.weights import save_weights
from core.train.failures import describe
from core.train.hub.model_files import inspect
from core.train.model.load import load_model
from tests.support.trainer import chats, events, log, notices, pairs, run, write_rows, write_run

SMALL = {"max_steps": 6, "per_device_train_batch_size": 4, "max_length": 64, "precision": "fp32"}


def go(tmp_path: Path, model: Path, rows: list[Any], *, held_out: list[Any] | None = None, **axes: Any) -> Path:
    train = write_rows(tmp_path / "train.jsonl", rows)
    held = write_rows(tmp_path / "held.jsonl", held_out) if held_out else None
    axes = {"training": SMALL} | axes
    run_dir = write_run(tmp_path / "run", model, train, held_out=held, **axes)
    run(run_dir)
    return run_dir


def only_error(run_dir: Path) -> dict[str, Any]:
    assert run(run_dir) == EXIT_FAILED
    error = events(run_dir)[-1]
    assert error["type"] == "error"
    return error


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_comes_out_loads_elsewhere_and_is_what_was_trained(tmp_path: Path, tiny_dir: Path, method: str) -> None:
    run_dir = go(tmp_path, tiny_dir, chats(30), held_out=chats(10), method=method, optimizer={"learning_rate": 1e-2})
    last = events(run_dir)[-1]
    assert last["type"] == "result", last
    artifacts = run_dir / "artifacts"
    listed = {entry["path"]: entry for entry in last["artifacts"]}
    assert set(listed) == {p.relative_to(artifacts).as_posix() for p in artifacts.rglob("*") if p.is_file()}
    for path, entry in listed.items():
        content = (artifacts / path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
    kinds = {entry["kind"] for entry in listed.values()}
    assert kinds >= {"plot", "metrics", "run_record", "card", "tokenizer", "adapter" if method == "lora" else "model"}
    assert (artifacts / "loss.png").read_bytes().startswith(b"\x89PNG")

    # The held-out loss of the last evaluation, computed again by plain libraries from what lies on the disk.
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    if method == "lora":
        model: Any = PeftModel.from_pretrained(base, artifacts / "adapter")
    else:
        model = AutoModelForCausalLM.from_pretrained(artifacts / "model")
    tokenizer = AutoTokenizer.from_pretrained(artifacts / ("adapter" if method == "lora" else "model"))
    total, count = 0.0, 0
    for row in chats(10):
        question = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=True)
        start = len(question["input_ids"])
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]])
        ids = ids[:, : (ids[0] == tokenizer.eos_token_id).nonzero()[-1] + 1]
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=ids).logits.float(), -1)[0, start - 1 : -1]
        total -= float(logp.gather(1, ids[0, start:, None]).sum())
        count += ids.shape[1] - start
    after = last["result"]["eval_after"]
    assert total / count == pytest.approx(after["eval_loss"], rel=1e-4)
    assert after["eval_loss"] < last["result"]["eval_before"]["eval_loss"]
    assert after["eval_perplexity"] == pytest.approx(math.exp(after["eval_loss"]))


@pytest.fixture(scope="module")
def one_step(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each method. It is everybody's: nothing is written there."""
    found = {}
    for method in ("lora", "full"):
        folder = tmp_path_factory.mktemp(method)
        found[method] = go(folder, tiny_dir, pairs(8), method=method, training=SMALL | {"max_steps": 1})
        assert events(found[method])[-1]["type"] == "result"
    return found


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("damage", ["gone", "other numbers", "another tensor", "cut"])
def test_weights_that_are_not_what_was_trained_are_never_handed_back(
    tmp_path: Path, tiny_dir: Path, one_step: dict[str, Path], method: str, damage: str
) -> None:
    """A disk that gives back something else than was written, or a library that writes something else."""
    record = json.loads((one_step[method] / "artifacts" / "run_record.json").read_text())
    kind = "adapter" if method == "lora" else "model"
    assert record["handed_back"] == {"folder": kind, "compared": "bits"}
    folder = shutil.copytree(one_step[method] / "artifacts" / kind, tmp_path / kind)
    base = load_model(tiny_dir, torch.float32)
    if method == "lora":
        trained: Any = PeftModel.from_pretrained(base, folder)
        settled: Any = LoRA()
    else:
        trained, settled = load_model(folder, torch.float32), Full()
    assert check_saved(trained, settled, folder) == "bits"
    file = folder / ("adapter_model.safetensors" if method == "lora" else "model.safetensors")
    tensors = load_file(file)
    name = min(tensors)
    match damage:
        case "gone":
            file.unlink()
        case "other numbers":
            tensors[name].view(-1)[-1] += 1e-4
            save_file(tensors, file, {"format": "pt"})
        case "another tensor":
            save_file(tensors | {"more": torch.zeros(1)}, file, {"format": "pt"})
            if method == "full":  # transformers leaves out what a model has no place for: one must be missing
                save_file({k: v for k, v in tensors.items() if k != name}, file, {"format": "pt"})
        case _:
            file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ArtifactsDiffer) as raised:
        check_saved(trained, settled, folder)
    assert describe(raised.value)["code"] == "artifacts_differ"


def test_an_adapter_beside_a_model_is_refused_and_not_loaded_on_top(
    tmp_path: Path, tiny_dir: Path, one_step: dict[str, Path]
) -> None:
    """As axolotl and others leave them: transformers would load the adapter over the model, silently."""
    both = tmp_path / "both"
    shutil.copytree(tiny_dir, both)
    for file in (one_step["lora"] / "artifacts" / "adapter").glob("adapter_*"):
        shutil.copy(file, both)
    with pytest.raises(ModelError, match=r"adapter_config\.json.*move the adapter_\* files out") as raised:
        inspect(both, field="model")
    assert raised.value.code == "model_unsupported"
    rows = write_rows(tmp_path / "rows.jsonl", pairs(8))
    error = only_error(write_run(tmp_path / "second", both, rows, method="full", training=SMALL))
    assert (error["failure"], error["code"], error["field"]) == ("user", "model_unsupported", "model")


def test_figures_and_record(tmp_path: Path, tiny_dir: Path) -> None:
    run_dir = go(tmp_path, tiny_dir, pairs(10))
    seen = [event["type"] for event in events(run_dir)]
    assert [event["seq"] for event in events(run_dir)] == list(range(1, len(seen) + 1))
    metrics = events(run_dir, "metrics")
    assert [event["step"] for event in metrics] == [1, 2, 3, 4, 5, 6]
    names = {
        "loss",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "total_tokens",
        "padding_share",
        "memory_bytes",
        "epoch",
    }
    assert all(set(event["values"]) == names for event in metrics)
    assert metrics[-1]["values"]["epoch"] == 2.0
    assert all(0 <= event["values"]["padding_share"] < 1 for event in metrics)
    (record,) = (event["record"] for event in events(run_dir, "run_record"))
    train = record["data"]["train"]
    assert train["sha256"] == hashlib.sha256((tmp_path / "train.jsonl").read_bytes()).hexdigest()
    assert (train["rows"], train["format"]) == (10, "prompt_completion")
    assert record["environment"]["threads"] == torch.get_num_threads()
    assert record["environment"]["versions"]["torch"] == torch.__version__
    result = events(run_dir)[-1]["result"]
    assert result["total_tokens"] == 2 * train["tokens"]
    assert events(run_dir, "progress")[-1]["seconds_left"] == 0
    # It was started by hand. A service advises on its steps at submit, and its trainer doesn't repeat it.
    (few,) = [event for event in events(run_dir, "notice") if event["code"] == "few_steps"]
    assert "too few to learn much" in few["message"]


def test_bf16_keeps_what_is_trained_in_float32(tmp_path: Path, tiny_dir: Path) -> None:
    """And adapters are on attention alone where that is asked for."""
    methods: dict[str, Any] = {"lora": {"type": "lora", "target_modules": "attention"}, "full": "full"}
    for method, asked in methods.items():
        folder = tmp_path / method
        folder.mkdir()
        run_dir = go(folder, tiny_dir, pairs(8), method=asked, training=SMALL | {"precision": "bf16", "max_steps": 2})
        (record,) = (event["record"] for event in events(run_dir, "run_record"))
        assert record["environment"]["precision"] == "bf16"
        assert record["precision"]["weights"] == ("bfloat16" if method == "lora" else "float32")
        assert events(run_dir)[-1]["type"] == "result"
    config = json.loads((tmp_path / "lora" / "run" / "artifacts/adapter/adapter_config.json").read_text())
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_evaluating_does_not_change_the_weights(tmp_path: Path, tiny_dir: Path) -> None:
    weights = []
    for name, evaluation in (("no", "none"), ("yes", {"type": "held_out", "eval_steps": 2})):
        folder = tmp_path / name
        folder.mkdir()
        lora = {"type": "lora", "lora_dropout": 0.1}
        run_dir = go(folder, tiny_dir, pairs(12), held_out=pairs(5), evaluation=evaluation, method=lora)
        steps = [event["step"] for event in events(run_dir, "evaluation")]
        assert steps == ([] if name == "no" else [0, 2, 4, 6])
        weights.append((run_dir / "artifacts/adapter/adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_an_adapter_names_the_commit_of_its_base(tmp_path: Path, tiny_dir: Path) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_dir), LoraConfig(target_modules="all-linear"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    folder = save_weights(model, tokenizer, LoRA(), tmp_path, base="team/tiny", revision="c" * 40, dtype=torch.float32)
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("team/tiny", "c" * 40)


def test_raw_text_learns_every_token(tmp_path: Path, tiny_dir: Path) -> None:
    rows = [{"text": f"line {n}"} for n in range(8)]
    run_dir = go(tmp_path, tiny_dir, rows, held_out=rows[:3])
    lines = [line.split() for line in log(run_dir).splitlines() if line.startswith("20")]  # with a time: no library's
    kinds = [kind.rstrip(":") for _, kind, *_ in lines]
    assert kinds[0] == "loading" and kinds[-1] == "done" and {"step", "evaluation", "training", "saving"} <= set(kinds)
    assert sum(kind == "step" for kind in kinds) == len(events(run_dir, "metrics")), "a short run shows every step"
    (record,) = (event["record"] for event in events(run_dir, "run_record"))
    train = record["data"]["train"]
    assert (record["data"]["loss_on"], train["label_tokens"]) == ("all", train["tokens"] - 8)
    assert "eval_exact_match" not in events(run_dir)[-1]["result"]["eval_after"]


@pytest.mark.parametrize(
    ("rows", "field", "words"),
    [
        (["{"], "line 1", "not valid JSON"),
        ([*pairs(3), {"prompt": "x"}, *pairs(3)], "line 4: completion", "needs `completion`"),
        ([*pairs(2), {"text": "x"}], "line 3", "one format a file"),
        ([], "data.train", "no rows"),
    ],
)
def test_bad_rows_are_the_users_and_named(
    tmp_path: Path, tiny_dir: Path, rows: list[Any], field: str | None, words: str
) -> None:
    train = write_rows(tmp_path / "train.jsonl", rows)
    run_dir = write_run(tmp_path / "run", tiny_dir, train, training=SMALL)
    error = only_error(run_dir)
    assert (error["failure"], error["code"], error["field"]) == ("user", "invalid_data", field)
    assert words in error["message"]
    told = log(run_dir)
    assert "Traceback" not in told and f"error invalid_data (user): {error['message']}" in told


def test_rows_longer_than_the_limit_are_told(tmp_path: Path, tiny_dir: Path) -> None:
    rows = [*pairs(6), {"prompt": "x" * 200, "completion": "y"}]
    run_dir = go(tmp_path, tiny_dir, rows)
    (notice,) = notices(run_dir)
    assert notice["code"] == "rows_truncated"
    assert "1 training rows" in notice["message"] and "left out" in notice["message"]
    assert events(run_dir, "run_record")[0]["record"]["data"]["train"]["rows"] == 6


def test_a_run_that_diverges_says_so(tmp_path: Path, tiny_dir: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(8))
    axes = {"optimizer": {"learning_rate": 10.0}, "method": "full", "schedule": {"type": "linear", "warmup_ratio": 0.0}}
    training = SMALL | {"max_steps": 400, "max_grad_norm": None}
    # A weight that is not a number is what a diverged run starts from; here it is in the model already.
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    model.save_pretrained(broken)
    AutoTokenizer.from_pretrained(tiny_dir).save_pretrained(broken)
    error = only_error(write_run(tmp_path / "run", broken, train, training=training, **axes))
    assert (error["failure"], error["code"], error["field"]) == ("user", "diverged", "optimizer.learning_rate")
    assert error["message"].startswith("the loss became nan at step 1; lower optimizer.learning_rate, raise schedule.")


def test_a_run_that_unlearns_is_told_while_it_runs(tmp_path: Path, tiny_dir: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(8))
    axes = {"optimizer": {"learning_rate": 10.0}, "method": "full", "schedule": {"type": "linear", "warmup_ratio": 0.0}}
    run_dir = write_run(tmp_path / "run", tiny_dir, train, training=SMALL | {"max_steps": 12}, **axes)
    assert run(run_dir) == EXIT_OK
    told = [one for one in notices(run_dir) if one["code"] == "training_loss_rose"]
    assert len(told) == 1, "once, though each later step is as bad"
    assert told[0]["seq"] < max(event["seq"] for event in events(run_dir, "metrics"))


def test_text_cannot_be_learned_by_completions(tmp_path: Path, tiny_dir: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"text": "a b c"}])
    stage = {"type": "sft", "loss_on": "completions"}
    error = only_error(write_run(tmp_path / "run", tiny_dir, train, training=SMALL, stage=stage))
    assert (error["failure"], error["field"]) == ("user", "stage.loss_on")


def test_unknown_target_modules_are_named(tmp_path: Path, tiny_dir: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(4))
    method = {"type": "lora", "target_modules": ["query"]}
    error = only_error(write_run(tmp_path / "run", tiny_dir, train, training=SMALL, method=method))
    assert (error["failure"], error["field"]) == ("user", "method.target_modules")
    assert "q_proj" in error["message"]


def test_a_missing_model_is_the_users(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", pairs(4))
    error = only_error(write_run(tmp_path / "run", tmp_path / "nothing", train, training=SMALL))
    assert (error["failure"], error["code"]) == ("user", "model_unavailable")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_ask_answers_with_plain_libraries(tmp_path: Path, tiny_dir: Path, method: str) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ab"}]
    training = SMALL | {"max_steps": 120}
    rows = [{"messages": chat}] * 8
    run_dir = go(tmp_path, tiny_dir, rows, training=training, method=method, optimizer={"learning_rate": 5e-3})
    if method == "lora":  # adapters of a random model learn the letters, but not to stop
        answer = ask(tiny_dir, "q", adapter=run_dir / "artifacts" / "adapter", max_new_tokens=2)
        assert (answer.text, answer.finished) == ("ab", False)
        assert ask(tiny_dir, "q", max_new_tokens=2).text != "ab"
    else:
        answer = ask(run_dir / "artifacts" / "model", "q", max_new_tokens=8)
        assert (answer.text, answer.finished, answer.new_tokens) == ("ab", True, 3)
