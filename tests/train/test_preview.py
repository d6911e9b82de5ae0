"""What a preview says, row by row, against what training does with the same order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError, SpecError
from core.plan.steps import run_steps, step_size, steps_for
from core.spec.run.exit_codes import EXIT_OK
from core.spec.run.folder import ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.data import streaming
from core.train.data.preview import SHOWN_HEAD, SHOWN_TAIL, preview, segments
from core.train.data.streaming import StreamLoader
from core.train.render.renderer import renderer_of
from core.train.vocabulary.tokenizer import load_tokenizer
from tests.support.rewards import solutions
from tests.support.trainer import PLAIN, chats, events, pairs, run, write_rows, write_run


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    return load_tokenizer(tiny_dir)


def look(folder: Path, tiny_dir: Path, tokenizer: Any, rows: list[Any], **axes: Any) -> dict[str, Any]:
    run_dir = write_run(folder, tiny_dir, write_rows(folder.with_suffix(".jsonl"), rows), **axes)
    found = preview(RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes()), tokenizer)
    assert json.loads(json.dumps(found)) == found
    return found


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"batching": {"type": "tokens", "tokens_per_batch": 96}},
        {"batching": {"type": "packed", "tokens_per_batch": 96}},
        {"training": {"truncation": "split", "max_length": 16}},
    ],
    ids=["rows", "tokens", "packed", "split"],
)
def test_training_does_what_was_said(tiny_dir: Path, tokenizer: Any, tmp_path: Path, axes: dict[str, Any]) -> None:
    training = {"max_length": 24, "per_device_train_batch_size": 2, "num_train_epochs": 1.0, "precision": "fp32"}
    axes = axes | {"training": training | axes.get("training", {}), "optimizer": {"learning_rate": 1e-3}}
    found = look(tmp_path / "preview", tiny_dir, tokenizer, pairs(20), **axes)
    run_dir = write_run(tmp_path / "run", tiny_dir, tmp_path / "preview.jsonl", **axes)
    assert run(run_dir) == EXIT_OK, events(run_dir, "error")
    (record,) = events(run_dir, "run_record")
    (result,) = events(run_dir, "result")
    said, done = found["epoch"], record["record"]["data"]["train"]
    assert (found["rows"]["used"], found["rows"]["truncated"], found["rows"]["dropped"], found["rows"]["pieces"]) == (
        done["rows"], done["truncated"], done["dropped"], done["pieces"],
    )  # fmt: skip
    assert (said["tokens"], said["label_tokens"]) == (done["tokens"], done["label_tokens"])
    assert said["total_steps"] == said["steps"] == result["result"]["steps"]
    assert said["tokens"] == result["result"]["total_tokens"]
    padding = [event["values"]["padding_share"] for event in events(run_dir, "metrics")]
    assert min(padding) <= said["padding_share"] <= max(padding)


@pytest.mark.parametrize(("generations", "iterations"), [(2, 2), (4, 1)])
def test_a_rollout_is_so_many_prompts_and_taken_so_many_times(
    tiny_dir: Path, tokenizer: Any, tmp_path: Path, generations: int, iterations: int
) -> None:
    """What preview and plan say before, and what the run then does."""
    axes: dict[str, Any] = {
        "data": {"train": {"type": "path", "path": str(tmp_path / "preview.jsonl"), "format": "prompt"}},
        "stage": {
            "type": "grpo", "num_generations": generations, "num_iterations": iterations, "max_completion_length": 2,
            "reward": ["exact"], "force": True,
        },
        "method": {"type": "lora", "r": 2},
        "training": {
            "max_length": 64, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "num_train_epochs": 1.0, "precision": "fp32",
        },
    }  # fmt: skip
    found = look(
        tmp_path / "preview", tiny_dir, tokenizer, [{"prompt": f"{n}?", "reference": "7"} for n in "123"], **axes
    )
    run_dir = write_run(tmp_path / "run", tiny_dir, tmp_path / "preview.jsonl", **axes)
    assert run(run_dir) == EXIT_OK, events(run_dir, "error")
    (result,) = events(run_dir, "result")
    spec = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes()).spec
    rollouts = math.ceil(3 * generations / 4)
    assert found["epoch"]["steps"] == rollouts
    assert found["epoch"]["total_steps"] == result["result"]["steps"] == rollouts * iterations
    assert run_steps(spec, lambda _: steps_for(3, step_size(spec))) == rollouts * iterations


@pytest.mark.parametrize(
    ("batching", "gpus"),
    [
        (None, 1),
        ({"type": "tokens", "tokens_per_batch": 96}, 2),
        ({"type": "packed", "tokens_per_batch": 96}, 1),
    ],
    ids=["rows", "tokens", "packed"],
)
@pytest.mark.parametrize("barren", [False, True], ids=["", "a block has nothing to learn"])
def test_a_stream_is_counted_in_the_blocks_that_training_takes(
    tiny_dir: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batching: Any,
    gpus: int,
    barren: bool,
) -> None:
    """Against the feed of every rank: 45 rows in blocks of 10, each with a smaller last step of its own."""
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 10)
    path = tmp_path / "preview.jsonl"
    axes: dict[str, Any] = {
        "data": {"train": str(path), "streaming": True, "rendering": PLAIN},
        "resources": {"gpus": gpus, "accelerator": "cpu"},
        "training": {
            "max_length": 24, "per_device_train_batch_size": 3, "max_steps": 100, "precision": "fp32",
            "truncation": "cut_right" if barren else "split",
        },
    }  # fmt: skip
    axes |= {} if batching is None else {"batching": batching}
    rows = pairs(45)
    if barren:
        rows[10:20] = [{"prompt": "x" * 99, "completion": " yes"}] * 10
    said = look(tmp_path / "preview", tiny_dir, tokenizer, rows, **axes)["epoch"]
    order = RunOrder.model_validate_json((tmp_path / "preview" / ORDER_FILE).read_bytes())
    tokens = slots = batches = 0
    for rank in range(gpus):
        feed = StreamLoader(
            order.train, order.spec, lambda kind: renderer_of(order.spec, kind, tokenizer), between=lambda: None,
            notice=print,
            rank=rank, world=gpus,
        )  # fmt: skip
        steps = 0
        while feed.epochs_after(steps) < 1:
            made = [batch_of() for batch_of in feed.batches(steps).batches]
            if feed.epochs_after(steps) >= 1:
                break
            steps += 1
            real = [batch for batch in made if batch.label_tokens]
            batches += len(real)
            tokens += sum(batch.tokens for batch in real)
            slots += sum(batch.slots for batch in real)
        assert said["steps"] == steps
    assert (said["blocks"], said["batches"], said["tokens"], said["total_steps"]) == (
        4 if barren else 5,
        batches,
        tokens,
        100,
    )
    assert said["padding_share"] == pytest.approx(1 - tokens / slots, abs=1e-4)


def test_every_row_that_would_be_refused_is_listed(tiny_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    strict = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no ' + m.content) }}{% endif %}"
    strict += "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    rows = chats(6)
    rows[1]["messages"][0]["content"], rows[4]["messages"][0]["content"] = "bad one", "bad two"
    data = {"train": str(tmp_path / "preview.jsonl"), "rendering": {"type": "given", "template": strict}}
    found = look(tmp_path / "preview", tiny_dir, tokenizer, rows, data=data)
    assert not found["ok"] and found["rows"]["refused"] == found["fault_count"] == 2
    assert [fault["line"] for fault in found["faults"]] == [2, 5] and "no bad two" in found["faults"][1]["message"]
    assert found["rows"]["used"] == 4 and len(found["samples"]) == 4


def test_one_cause_of_many_rows_is_told_once_with_their_lines(tiny_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    strict = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no bad words') }}{% endif %}"
    strict += "{{ m.role }}: {{ m.content }}\n{% endfor %}"
    rows = chats(30)
    for line in (2, 3, 4, 9, 30):
        rows[line - 1]["messages"][0]["content"] = f"bad {line}"
    data = {"train": str(tmp_path / "preview.jsonl"), "rendering": {"type": "given", "template": strict}}
    found = look(tmp_path / "preview", tiny_dir, tokenizer, rows, data=data)
    (fault,) = found["faults"]
    assert (fault["field"], fault["line"], fault["times"]) == ("lines 2 to 4, 9 and 30", 2, 5)
    assert "no bad words" in fault["message"] and found["fault_count"] == found["rows"]["refused"] == 5


def test_too_long_for_a_policy_that_refuses(tiny_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    training = {"truncation": "refuse", "max_length": 16}
    found = look(tmp_path / "preview", tiny_dir, tokenizer, pairs(6), training=training)
    assert not found["ok"] and found["rows"]["used"] == 0 and found["tokens"]["longest"] > 16
    (fault,) = found["faults"]
    assert fault["field"] == "training.max_length" and "truncation" in fault["message"]


def test_preferences_are_pairs_with_their_prompt(tiny_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "chosen": f" {n + 1}", "rejected": " no"} for n in range(3)]
    found = look(tmp_path / "preview", tiny_dir, tokenizer, rows)
    assert found["format"] == "preference" and found["rows"] == found["rows"] | {"file": 3, "used": 3}
    assert [sample["sequence"] for sample in found["samples"]] == ["chosen", "rejected"] * 3
    prompt, answer = found["samples"][0]["segments"]
    assert (prompt["text"], prompt["learned"], answer["learned"]) == ("0+1?", False, True)
    assert "shared_tokens" not in found["epoch"]
    batching = {"type": "packed", "tokens_per_batch": 64}
    packed = look(tmp_path / "packed", tiny_dir, tokenizer, rows, stage="dpo", batching=batching)
    prompts = [sample["tokens"] - sample["label_tokens"] for sample in packed["samples"][::2]]
    assert sum(prompts) <= packed["epoch"]["shared_tokens"] <= sum(prompts) + len(rows)  # answers begin with a space
    alone = look(
        tmp_path / "alone", tiny_dir, tokenizer, rows, stage="dpo", batching=batching | {"share_prompts": False}
    )
    assert "shared_tokens" not in alone["epoch"]


def test_steps_are_shown_with_their_judgements(tiny_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    rows = solutions(3)
    found = look(tmp_path / "all", tiny_dir, tokenizer, rows, stage="process_reward")
    assert found["ok"] and found["format"] == "stepwise"
    assert [sample["labels"] for sample in found["samples"]] == [[float(one) for one in row["labels"]] for row in rows]
    assert [part["text"] for part in found["samples"][2]["segments"] if part["learned"]] == ["\n"] * 3
    stage = {"type": "process_reward", "last_step_only": True}
    last = look(tmp_path / "last", tiny_dir, tokenizer, rows, stage=stage)
    assert [sample["labels"] for sample in last["samples"]] == [[float(row["labels"][-1])] for row in rows]
    assert last["epoch"]["label_tokens"] == 3


def test_a_cut_row_is_held_against_itself_and_not_against_its_line(
    tiny_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}+1?", "chosen": f" {n + 1}", "rejected": " no" * 40} for n in range(3)]
    found = look(tmp_path / "preview", tiny_dir, tokenizer, rows, training={"max_length": 24})
    assert found["rows"]["truncated"] == 3
    cut = [sample["cut_from"] for sample in found["samples"]]
    assert cut[0::2] == [None] * 3 and all(length is not None and length > 24 for length in cut[1::2])


def test_a_file_with_faults_and_options_that_do_not_fit(tiny_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        look(tmp_path / "bad", tiny_dir, tokenizer, [{"text": "a"}, {"text": 1}, {"txt": "b"}])
    assert len(caught.value.faults) == 2
    with pytest.raises(SpecError, match="loss_on"):
        look(tmp_path / "text", tiny_dir, tokenizer, [{"text": "a"}], stage={"type": "sft", "loss_on": "completions"})


def test_the_middle_of_a_long_row_is_left_out(tokenizer: Any) -> None:
    ids = tokenizer("x" * (SHOWN_HEAD + SHOWN_TAIL + 7))["input_ids"]
    parts = segments(ids, [False] + [True] * (len(ids) - 1), tokenizer)
    assert [part.get("left_out") for part in parts] == [None, None, len(ids) - SHOWN_HEAD - SHOWN_TAIL, None]
    assert [part["learned"] for part in parts] == [False, True, False, True]
