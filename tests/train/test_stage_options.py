"""What a job of any stage may ask for beside its loss, all at once: rows in a stream, an early end and the best weights
by the stage's own metric, and samples; left in the middle and resumed to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.data import streaming
from tests.support.trainer import PLAIN, events, run, weights, write_rows, write_run
from tests.train.test_activations import InWindow
from tests.train.test_stage_properties import STAGES

METRICS = {
    "cpt": ("eval_loss", "Continued pre-training"),
    "dpo": ("eval_rewards/accuracies", "Direct preference optimization"),
    "simpo": ("eval_rewards/margins", "Simple preference optimization"),
    "orpo": ("eval_rewards/margins", "Odds ratio preference optimization"),
    "kto": ("eval_rewards/margins", "Kahneman-Tversky optimization"),
    "reward": ("eval_accuracy", "Reward model"),
    "process_reward": ("eval_f1", "Process reward model"),
}
"""A metric of each stage, and its name in a model card."""
WITHOUT_TEXT = ("reward", "process_reward")
STEPS = 6


@pytest.mark.parametrize("name", METRICS)
def test_a_stream_with_evaluations_samples_and_an_early_end(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(streaming, "BLOCK_ROWS", 5)  # of 12: a step of the second block is followed by one of the third
    case, (metric, title) = STAGES[name], METRICS[name]
    rows = write_rows(tmp_path / "rows.jsonl", case.rows)
    source = {"type": "path", "path": str(rows), "format": case.format}
    evaluation = {
        "type": "held_out", "eval_steps": 1, "metric_for_best_model": metric, "load_best_model_at_end": True,
        "early_stopping": {"type": "patience", "patience": 2, "min_delta": 1000.0},  # no better one is by as much
    } | ({} if name in WITHOUT_TEXT else {"samples": {"type": "greedy", "rows": 1, "max_new_tokens": 4}})  # fmt: skip

    def written(folder: str, resume_from: list[Path]) -> Path:
        return write_run(
            tmp_path / folder,
            tiny_dir,
            rows,
            resume_from=resume_from,
            data={"train": source, "eval": source, "streaming": True, "rendering": PLAIN},
            stage=case.stage,
            method={"type": "lora", "r": 4, "lora_dropout": 0.1},
            optimizer={"learning_rate": 1e-2},
            training={
                "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                "max_length": 64, "precision": "fp32",
            },
            batching="rows",
            evaluation=evaluation,
        )  # fmt: skip

    calm = written("calm", [])
    assert run(calm) == EXIT_OK, events(calm)[-1]
    (result,) = events(calm, "result")
    measured = {event["step"]: event["values"][metric] for event in events(calm, "evaluation")}
    best = min if metric == "eval_loss" else max
    assert result["result"]["best"]["step"] == best(measured, key=lambda step: measured[step])
    assert result["result"]["stopped_early"] and result["result"]["steps"] == 2
    told = events(calm, "samples")
    assert bool(told) == (name not in WITHOUT_TEXT)
    assert title in (calm / "artifacts" / "adapter" / "README.md").read_text()

    left = written("left", [])
    assert run(left, InWindow(left, 3)) == EXIT_CHECKPOINTED, events(left)[-1]
    resumed = written("resumed", [left])
    assert run(resumed) == EXIT_OK, events(resumed)[-1]
    assert weights(resumed) == weights(calm)
    again = {event["step"]: event["values"] for folder in (left, resumed) for event in events(folder, "evaluation")}
    assert {step: values[metric] for step, values in again.items()} == measured
