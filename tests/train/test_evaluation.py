"""Evaluation: what it decides, that training does not notice it, and that a killed run decides the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from core.errors import SpecError
from core.spec.axes.runtime import HeldOut, Patience
from core.spec.load import parse_job
from core.spec.run.checkpoint_names import best_name
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.train.base.stop import Stop
from core.train.checkpoint import store
from core.train.entry.ask import ask
from core.train.evaluation.early_stopping import early_stopping, needed
from core.train.stages.sft import SupervisedFineTuning
from tests.support.trainer import chats, events, killed_after, log, notices, run, weights, write_rows, write_run

AXES: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": {
        "max_steps": 40,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "precision": "fp32",
        "max_length": 64,
    },
    "checkpoint": {"type": "disk", "save_steps": 3, "keep_last": 2},
}
EVALUATION: dict[str, Any] = {"type": "held_out", "eval_steps": 2, "per_device_eval_batch_size": 4}
STAGE = SupervisedFineTuning()
LETTERS = """
def metric(prompts, completions, references):
    return [len(c) / 100 + len(r) / 1000 + ("say" in p) / 2000 for p, c, r in zip(prompts, completions, references)]
"""
OWN = {"type": "python", "name": "letters", "source": LETTERS}
GENERATION = {"metrics": ["exact_match", "chrf", OWN], "rows": 5, "max_new_tokens": 8}
BEST = EVALUATION | {
    "early_stopping": {"type": "patience", "patience": 3},
    "load_best_model_at_end": True,
    "generation": GENERATION,
}
GREEDY = {"type": "greedy", "rows": 3, "prompts": ["say hello"], "max_new_tokens": 10}


class StopAt(Stop):
    """Asked to leave at the n-th place where the run looks whether it should."""

    def __init__(self, place: int) -> None:
        self.left = place

    @property  # type: ignore[override]
    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the trainers of tests.support.trainer have it: sums in another order would be other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Held-out rows that want something else than what is trained: soon the evaluations get worse."""
    folder = tmp_path_factory.mktemp("rows")

    def of(letter: str, count: int) -> list[Any]:
        return [{"prompt": f"count to {n}:", "completion": " " + letter * (n % 7 + 1)} for n in range(count)]

    return write_rows(folder / "train.jsonl", of("x", 24)), write_rows(folder / "held.jsonl", of("z", 8))


def go(folder: Path, model: Path, rows: tuple[Path, Path], evaluation: Any, **axes: Any) -> Path:
    run_dir = write_run(folder, model, rows[0], held_out=rows[1], **(AXES | axes | {"evaluation": evaluation}))
    assert run(run_dir) == EXIT_OK, events(run_dir, "error")
    return run_dir


def result(run_dir: Path) -> dict[str, Any]:
    (event,) = events(run_dir, "result")
    return dict(event["result"])


def adapter(file: Path) -> dict[str, torch.Tensor]:
    return {name.replace(".default.", "."): tensor for name, tensor in load_file(file).items()}


def evaluations(*run_dirs: Path) -> dict[int, dict[str, float]]:
    return {event["step"]: event["values"] for one in run_dirs for event in events(one, "evaluation")}


def samples(*run_dirs: Path) -> dict[int, Any]:
    return {event["step"]: event["samples"] for one in run_dirs for event in events(one, "samples")}


@pytest.fixture(scope="module")
def stopped(tiny_dir: Path, rows: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody touched, with everything on."""
    return go(tmp_path_factory.mktemp("calm") / "run", tiny_dir, rows, BEST | {"samples": GREEDY})


# --- decisions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "best", "waited", "stop"),
    [
        ([], 2, 0.0, None, 0, False),
        ([3, 2, 1], 2, 0.0, 4, 0, False),
        ([3, 2, 2, 2], 2, 0.0, 2, 2, True),  # the first of equals
        ([3, 2, 2.5, 1.9], 2, 0.0, 6, 0, False),
        ([3, 2.9, 2.8, 2.7], 2, 0.25, 6, 0, False),  # small steps add up until they are more than min_delta
        ([3, 2.9, 2.8, 2.75], 3, 0.5, 6, 3, True),  # better, but not by enough: still the best to hand back
        ([1, 2, 3], 2, 0.0, 0, 2, True),  # nothing beats the untrained model
    ],
)
def test_verdicts(
    losses: list[float], patience: int, min_delta: float, best: int | None, waited: int, stop: bool
) -> None:
    spec = HeldOut(eval_steps=2, early_stopping=Patience(patience=patience, min_delta=min_delta))
    found = early_stopping([{"step": 2 * n, "eval_loss": loss} for n, loss in enumerate(losses)], spec, STAGE)
    assert (found.best and found.best["step"], found.waited, found.stop) == (best, waited, stop)


def test_more_matches_are_better_and_without_patience_nothing_stops() -> None:
    spec = HeldOut(eval_steps=1, metric_for_best_model="eval_exact_match")
    found = early_stopping(
        [{"step": n, "eval_exact_match": share} for n, share in enumerate((0.1, 0.5, 0.3, 0.2))], spec, STAGE
    )
    assert found.best is not None and found.best["step"] == 1
    assert found.waited == 2 and not found.stop


def test_weights_that_an_older_checkpoint_calls_the_best_are_kept() -> None:
    seen = [{"step": step, "eval_loss": loss} for step, loss in ((0, 5), (2, 3), (4, 4), (6, 2), (8, 2.5))]
    spec = HeldOut(eval_steps=2, load_best_model_at_end=True)
    assert needed(seen, spec, STAGE, []) == {6}
    assert needed(seen, spec, STAGE, [5, 7]) == {2, 6}
    assert needed(seen, spec, STAGE, [2]) == {0, 2, 6}  # written before the evaluation of its own step, or after


@pytest.mark.parametrize("field", [{"early_stopping": "patience"}, {"load_best_model_at_end": True}])
def test_comparing_needs_evaluations_to_compare(field: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="eval_steps") as caught:
        parse_job({"model": "a/b", "data": {"train": "/t", "eval": "/e"}, "evaluation": {"type": "held_out"} | field})
    assert caught.value.field == "evaluation"


def test_a_metric_that_is_not_measured_is_refused(tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path) -> None:
    axes = AXES | {"evaluation": EVALUATION | {"metric_for_best_model": "eval_exact_match"}}
    run_dir = write_run(
        tmp_path / "run", tiny_dir, rows[0], held_out=rows[1], **axes, stage={"type": "sft", "loss_on": "all"}
    )
    assert run(run_dir) == EXIT_FAILED
    (error,) = events(run_dir, "error")
    assert (error["failure"], error["field"]) == ("user", "evaluation.metric_for_best_model")


# --- runs --------------------------------------------------------------------------------------------------


def test_it_stops_early_and_hands_back_the_best(stopped: Path) -> None:
    found, seen = result(stopped), evaluations(stopped)
    best = min(seen, key=lambda step: seen[step]["eval_loss"])
    assert 0 < best < found["steps"] < 40
    assert found["stopped_early"] and found["steps"] == best + 3 * 2
    assert found["best"] == {"step": best, "metric": "eval_loss", "value": seen[best]["eval_loss"], "restored": True}
    assert found["eval_before"] == seen[0] and found["eval_after"] == seen[best]
    told = [event["code"] for event in notices(stopped)]
    assert told == ["early_stopping", "best_restored"]
    kept = adapter(stopped / "checkpoints" / best_name(best) / "weights.safetensors")
    handed = adapter(stopped / "artifacts" / "adapter" / "adapter_model.safetensors")
    assert kept.keys() == handed.keys() and all(torch.equal(kept[name], handed[name]) for name in kept)
    last = store.newest_first([stopped / "checkpoints"])[0]
    trained = adapter(last.path / "weights.safetensors")
    assert last.step > best and not all(torch.equal(trained[name], handed[name]) for name in handed)
    card = (stopped / "artifacts" / "adapter" / "README.md").read_text()
    assert f"The weights are those after step {best}, the best by eval_loss." in card
    assert "Base model:" in card and "This model:" in card


def test_samples_are_told_kept_and_what_the_model_says(stopped: Path, tiny_dir: Path) -> None:
    told = samples(stopped)
    assert told.keys() == evaluations(stopped).keys()
    assert [(one["row"], one["reference"]) for one in told[0]] == [(0, " z"), (2, " zzz"), (5, " zzzzzz"), (None, None)]
    assert told[0][0]["prompt"] == "count to 0:"
    lines = [json.loads(line) for line in (stopped / "artifacts" / "samples.jsonl").read_text().splitlines()]
    assert lines == [{"step": step} | one for step, all_of_it in told.items() for one in all_of_it]
    kinds = {entry["path"]: entry["kind"] for entry in events(stopped, "result")[0]["artifacts"]}
    assert kinds["samples.jsonl"] == "samples"
    best = result(stopped)["best"]["step"]
    for step, folder in ((0, None), (best, stopped / "artifacts" / "adapter")):
        answer = ask(tiny_dir, "say hello", adapter=folder, plain=True, max_new_tokens=10)
        assert told[step][3]["completion"].strip() == answer.text
        assert told[step][3]["finished"] == answer.finished


def test_answers_are_scored_as_they_can_be_read(stopped: Path, rows: tuple[Path, Path], tmp_path: Path) -> None:
    """Figures of the last evaluation are those of answers.jsonl, whose answers are those of the samples."""
    lines = [json.loads(line) for line in (stopped / "artifacts" / "answers.jsonl").read_text().splitlines()]
    seen, last = evaluations(stopped), result(stopped)["steps"]
    assert [line["step"] for line in lines] == [last] * 5
    held = [json.loads(line) for line in rows[1].read_text().splitlines()]
    for line in lines:
        row = held[line["line"] - 1]
        assert (line["prompt"], line["reference"]) == (row["prompt"], row["completion"])
        assert line["scores"]["eval_generated/exact_match"] == (line["answer"].strip() == row["completion"].strip())
        own = len(line["answer"]) / 100 + len(line["reference"]) / 1000 + ("say" in line["prompt"]) / 2000
        assert line["scores"]["eval_generated/letters"] == own
    for name in ("eval_generated/exact_match", "eval_generated/chrf", "eval_generated/letters"):
        assert seen[last][name] == sum(line["scores"][name] for line in lines) / 5
        assert all(0 <= values[name] <= 1 for values in seen.values())
    sampled = {one["row"]: one["completion"] for one in samples(stopped)[last] if one["row"] is not None}
    assert lines[0]["answer"] == sampled[0][: len(lines[0]["answer"])]
    kinds = {entry["path"]: entry["kind"] for entry in events(stopped, "result")[0]["artifacts"]}
    assert kinds["answers.jsonl"] == "answers"
    assert "eval_generated/chrf" in (stopped / "artifacts" / "adapter" / "README.md").read_text()


def test_rows_without_a_prompt_have_no_answer_to_score(tiny_dir: Path, tmp_path: Path) -> None:
    text = write_rows(tmp_path / "text.jsonl", [{"text": "abcdefghij" * 4}] * 3)
    held = EVALUATION | {"generation": GENERATION}
    run_dir = write_run(tmp_path / "run", tiny_dir, text, held_out=text, **(AXES | {"evaluation": held}))
    assert run(run_dir) == EXIT_FAILED
    (error,) = events(run_dir, "error")
    assert (error["failure"], error["code"]) == ("user", "no_prompt_to_answer")
    assert "line 1 has no prompt" in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('no such word')", "no such word"),
        ("return [1.0]", "return a list of 4 numbers"),
        ("return [float('nan')] * len(completions)", "return a finite number"),
    ],
)
def test_a_metric_of_users_that_gives_no_number(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path, body: str, words: str
) -> None:
    metric = {"type": "python", "source": f"def metric(completions):\n    {body}"}
    held = EVALUATION | {"generation": {"metrics": [metric], "rows": 4, "max_new_tokens": 2}}
    run_dir = write_run(tmp_path / "run", tiny_dir, rows[0], held_out=rows[1], **(AXES | {"evaluation": held}))
    assert run(run_dir) == EXIT_FAILED
    (error,) = events(run_dir, "error")
    assert (error["failure"], error["code"]) == ("user", "metric_failed")
    assert "`eval_generated/python`" in error["message"] and "in line " in error["message"]
    assert words in error["message"] and not events(run_dir, "metrics"), "nothing was trained"


@pytest.mark.parametrize("kind", [GREEDY, GREEDY | {"type": "sampling", "temperature": 1.0}])
def test_samples_change_no_bit_of_the_training(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path, stopped: Path, kind: dict[str, Any]
) -> None:
    axes = {"training": AXES["training"] | {"max_steps": 6}}
    without = go(tmp_path / "without", tiny_dir, rows, EVALUATION, **axes)
    having = go(tmp_path / "with", tiny_dir, rows, EVALUATION | {"samples": kind}, **axes)
    assert weights(having) == weights(without)
    assert evaluations(having) == evaluations(without)
    assert len(samples(having)) == 4 and not samples(without)
    if kind["type"] == "sampling":  # the drawn ones are others than the greedy ones, and the same the next time
        again = go(tmp_path / "again", tiny_dir, rows, EVALUATION | {"samples": kind}, **axes)
        assert samples(again) == samples(having)
        assert samples(having)[0] != samples(stopped)[0]


def test_prompts_of_chats_and_of_raw_text(tiny_dir: Path, tmp_path: Path) -> None:
    axes = {"training": AXES["training"] | {"max_steps": 1}}
    held = EVALUATION | {"samples": {"type": "greedy", "rows": 1, "max_new_tokens": 3}}
    talk = write_rows(tmp_path / "chats.jsonl", chats(4))
    (of_chat,) = samples(go(tmp_path / "chat", tiny_dir, (talk, talk), held, **axes))[0]
    assert "say 0" in of_chat["prompt"] and of_chat["prompt"].endswith("assistant\n")
    assert of_chat["reference"] == "ok "
    text = write_rows(tmp_path / "text.jsonl", [{"text": "abcdefghij" * 4}])
    (of_text,) = samples(go(tmp_path / "text", tiny_dir, (text, text), held, **axes))[0]
    assert of_text["prompt"] == ("abcdefghij" * 4)[:16] and of_text["reference"] == ("abcdefghij" * 4)[16:]


# --- killed, and on it goes --------------------------------------------------------------------------------


def test_killed_after_the_best_it_decides_the_same(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path, stopped: Path
) -> None:
    """Killed twice: between the best evaluation and the stop, and (asked to leave) while the artifacts are written."""
    best = result(stopped)["best"]["step"]
    axes = AXES | {"evaluation": BEST | {"samples": GREEDY}}
    first = write_run(tmp_path / "first", tiny_dir, rows[0], held_out=rows[1], **axes)
    beyond = killed_after(lambda type, fields: type == "checkpoint" and fields["step"] > best)
    assert run(first, prepare=beyond) == -signal.SIGKILL, log(first)
    second = write_run(tmp_path / "second", tiny_dir, rows[0], held_out=rows[1], resume_from=[first], **axes)
    assert run(second) == EXIT_OK, events(second, "error")
    assert events(second, "resumed")[0]["step"] > best
    assert not (second / "checkpoints" / best_name(best)).exists()  # it was found in the first attempt's folder
    assert weights(second) == weights(stopped)
    assert evaluations(first, second) == evaluations(stopped)
    assert samples(first, second) == samples(stopped)
    ours, theirs = result(second), result(stopped)
    assert [ours[name] for name in ("steps", "best", "stopped_early")] == [
        theirs[name] for name in ("steps", "best", "stopped_early")
    ]
    assert (second / "artifacts" / "samples.jsonl").read_bytes() == (
        stopped / "artifacts" / "samples.jsonl"
    ).read_bytes()
    assert (second / "artifacts" / "answers.jsonl").read_bytes() == (
        stopped / "artifacts" / "answers.jsonl"
    ).read_bytes()


@pytest.mark.parametrize("place", [5, 40, 75])
def test_asked_to_leave_anywhere_it_decides_the_same(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path, stopped: Path, place: int
) -> None:
    """In evaluations, between two tokens of a sample, in a window: the next attempt ends with the same weights."""
    axes = AXES | {"evaluation": BEST | {"samples": GREEDY}}
    first = write_run(tmp_path / "first", tiny_dir, rows[0], held_out=rows[1], **axes)
    assert run(first, StopAt(place)) == EXIT_CHECKPOINTED
    second = write_run(tmp_path / "second", tiny_dir, rows[0], held_out=rows[1], resume_from=[first], **axes)
    assert run(second) == EXIT_OK, events(second, "error")
    assert weights(second) == weights(stopped)
    assert evaluations(first, second) == evaluations(stopped)
    assert result(second)["best"] == result(stopped)["best"]


def test_best_weights_that_are_gone_are_told(
    tiny_dir: Path, rows: tuple[Path, Path], tmp_path: Path, stopped: Path
) -> None:
    best = result(stopped)["best"]["step"]
    axes = AXES | {"evaluation": BEST}
    first = write_run(tmp_path / "first", tiny_dir, rows[0], held_out=rows[1], **axes)
    assert run(first) == EXIT_OK
    for left in (first / "checkpoints" / best_name(best)).glob("weights*"):
        left.write_bytes(left.read_bytes()[:-1])
    second = write_run(tmp_path / "second", tiny_dir, rows[0], held_out=rows[1], resume_from=[first], **axes)
    assert run(second) == EXIT_OK
    assert "best_missing" in [event["code"] for event in events(second, "notice")]
    assert result(second)["best"]["restored"] is False
    assert result(second)["eval_after"] == evaluations(first, second)[result(second)["steps"]]
