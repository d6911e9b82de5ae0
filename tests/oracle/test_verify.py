"""`eft verify` (docs/verify.md): a run's first steps under TRL, by the folder that the run has left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataError, SpecError
from core.train.entry import verify as entry
from core.train.verify.columns import columns
from core.train.verify.compare import compare
from core.train.verify.replay import options_of
from tests.support.trainer import chats, run, write_rows, write_run


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eft verify", *arguments])
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        code = entry.main()
        return code, *capsys.readouterr()

    return call


def test_a_run_is_replayed(tmp_path: Path, tiny_dir: Path, verify: Any) -> None:
    """Lengths are mixed, batches are packed and have no common number of rows, and the run has a partial step."""
    rows = write_rows(tmp_path / "rows.jsonl", chats(21))
    training = {"num_train_epochs": 2, "max_length": 64, "precision": "fp32", "seed": 5}
    training |= {"gradient_accumulation_steps": 2}
    folder = write_run(
        tmp_path / "run",
        tiny_dir,
        rows,
        method={"type": "lora", "r": 4, "lora_dropout": 0.0},
        batching={"type": "packed", "tokens_per_batch": 128},
        training=training,
    )
    assert run(folder) == 0
    code, out, _ = verify(str(folder), "--steps", "7", "--json", "--tolerance", "1e-4")
    document = json.loads(out)
    assert code == 0 and [row["step"] for row in document["steps"]] == list(range(1, 7))
    assert document["largest"]["loss"]["relative"] < 1e-5
    assert document["largest"]["grad_norm"]["relative"] < 1e-4
    assert document["largest"]["learning_rate"]["relative"] < 1e-9
    assert document["notes"] == []
    # A run that has computed something else is found out.
    path = folder / "events.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    third = next(event for event in lines if event["type"] == "metrics" and event["step"] == 3)
    third["values"]["loss"] *= 1.001
    path.write_text("".join(json.dumps(event) + "\n" for event in lines))
    code, out, err = verify(str(folder), "--steps", "3", "--tolerance", "1e-4")
    assert code == 1 and "largest difference" in out and "at step 3" in out and "differ by 1.0e-03" in err
    assert f"{third['values']['loss']:.6g}" in out, "a number is cut at 80 columns"


def test_what_cannot_be_verified_is_said(verify: Any) -> None:
    code, out, err = verify("job-01kar3v8x5m2h6n9qst4wyz0bc", "--json")
    assert code == 1 and json.loads(out)["error"]["field"] == "job"
    assert "run this on the box that trained it" in err
    smoothed = {"type": "dpo", "loss": "sigmoid", "label_smoothing": 0.1}
    for stage in ({"type": "dpo", "loss": "kto_pair", "label_smoothing": 0}, smoothed, {"type": "process_reward"}):
        with pytest.raises(SpecError, match="nothing to compare with"):
            options_of(stage)


def test_the_largest_difference() -> None:
    ours: dict[int, dict[str, float]] = {1: {"loss": 2.0, "a": 1.0}, 2: {"loss": 1.0, "a": 1.0}}
    theirs: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "b": 3.0},
        {"step": 2, "loss": 1.1},
        {"step": 3, "loss": 1.0},
    ]
    found = compare(ours, theirs)
    assert [row["step"] for row in found["steps"]] == [1, 2]
    assert found["largest"].keys() == {"loss"}
    assert found["largest"]["loss"]["step"] == 2
    assert found["largest"]["loss"]["relative"] == pytest.approx(0.1 / 1.1)


@pytest.mark.parametrize(
    ("trl", "ours", "relative"),
    [
        ([0.0, 0.2, -0.1], [1e-7, 0.2, -0.1], 1e-6),  # a margin that begins at 0
        ([0.0, 0.2, -0.1], [0.0, 0.3, -0.1], 1.0),
        ([0.0, 0.0], [0.0, 1e-7], 1e-7),
        ([-1.0, -2.0], [-1.0, -2.2], 0.1),  # log-probabilities keep their sign
    ],
)
def test_differences_near_zero_have_a_scale(trl: list[float], ours: list[float], relative: float) -> None:
    found = compare(
        {step: {"margin": value} for step, value in enumerate(ours)},
        [{"step": step, "margin": value} for step, value in enumerate(trl)],
    )
    assert found["largest"]["margin"]["relative"] == pytest.approx(relative)


STAGES: list[dict[str, Any]] = [
    {"type": "dpo"},
    {"type": "dpo", "loss": "robust", "label_smoothing": 0.1, "nll_weight": 0.5},
    {"type": "simpo"},
    {"type": "orpo"},
    {"type": "kto", "undesirable_weight": 1.5},
    {"type": "reward", "center_rewards_coefficient": 0.01},
]


@pytest.mark.parametrize("stage", STAGES, ids=["dpo", "robust", "simpo", "orpo", "kto", "reward"])
def test_stages_of_pairs_and_labels(tmp_path: Path, tiny_dir: Path, verify: Any, stage: dict[str, Any]) -> None:
    rows: list[Any] = [
        {"prompt": f"count to {n}:", "chosen": " one" * (n % 4 + 1), "rejected": " no" * (n % 3 + 1)} for n in range(12)
    ]
    if stage["type"] == "kto":
        rows = [{"prompt": f"count {n}:", "completion": " go" * (n % 5 + 1), "label": n % 3 > 0} for n in range(12)]
    folder = write_run(
        tmp_path / "run",
        tiny_dir,
        write_rows(tmp_path / "rows.jsonl", rows),
        stage=stage,
        method={"type": "lora", "r": 4},
        optimizer={"learning_rate": 2e-3},
        training={
            "num_train_epochs": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_length": 64,
            "precision": "fp32",
        },
    )
    assert run(folder) == 0
    code, out, _ = verify(str(folder), "--json", "--tolerance", "1e-5")
    document = json.loads(out)
    assert code == 0, document["largest"]["loss"]
    assert len(document["steps"]) == 3 and document["largest"]["grad_norm"]["relative"] < 1e-4
    of_reward = ("accuracy", "margin", "min_reward", "mean_reward", "max_reward")
    for figure in of_reward if stage["type"] == "reward" else ("rewards/margins",):
        assert document["largest"][figure]["absolute"] < 1e-5, figure


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_continued_pre_training(tmp_path: Path, tiny_dir: Path, verify: Any, precision: str, tolerance: float) -> None:
    rows = [{"text": f"chapter {n}:" + " and on it goes" * (n % 5 + 1)} for n in range(8)]
    folder = write_run(
        tmp_path / "run",
        tiny_dir,
        write_rows(tmp_path / "rows.jsonl", rows),
        stage="cpt",
        method={"type": "lora", "r": 4, "lora_dropout": 0.0},
        optimizer={"learning_rate": 2e-3},
        training={"max_steps": 2, "max_length": 64, "per_device_train_batch_size": 4, "precision": precision},
    )
    assert run(folder) == 0
    code, out, _ = verify(str(folder), "--json", "--tolerance", str(tolerance))
    document = json.loads(out)
    assert code == 0 and len(document["steps"]) == 2, document["largest"]["loss"]
    assert document["largest"]["grad_norm"]["relative"] < 10 * tolerance


def test_what_a_template_writes_behind_an_answer_is_left_out() -> None:
    chosen, rejected = ([1, 2, 3, 4, 9], [False, False, True, True, False]), ([1, 2, 7, 9], [False, False, True, False])
    assert columns("dpo", [chosen, rejected], {}) == {"prompt_ids": [1, 2], "chosen_ids": [3, 4], "rejected_ids": [7]}
    with pytest.raises(DataError, match="several turns"):
        columns("dpo", [([1, 2, 3, 4], [False, True, False, True]), rejected], {})
    with pytest.raises(DataError, match="different prompts"):
        columns("dpo", [chosen, ([5, 7], [False, True])], {})
