"""Runs of stages that learn from answers of the model: their orders, and what they have told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.spec.run.exit_codes import EXIT_OK
from tests.support.trainer import events, log, run, write_run

TRAINING: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "precision": "fp32",
}  # fmt: skip
CLOCKS = {"tokens_per_second", "memory_bytes"}


def rollout_run(folder: Path, model: Path, rows: Path, *, stage: dict[str, Any], **axes: Any) -> Path:
    """A run folder of a small adapter over prompts, with a checkpoint of each step; `axes` as write_run has them, or
    parts of the training and data that are set here."""
    return write_run(
        folder,
        model,
        rows,
        data={"train": {"type": "path", "path": str(rows), "format": "prompt"}} | axes.pop("data", {}),
        stage=stage,
        method=axes.pop("method", {"type": "lora", "r": 4}),
        training=TRAINING | axes.pop("training", {}),
        optimizer={"learning_rate": 1e-2},
        schedule="constant",
        checkpoint={"type": "disk", "save_steps": 1},
        **axes,
    )


def finished(run_dir: Path) -> Path:
    """The folder, once its run has ended well."""
    assert run(run_dir) == EXIT_OK, (events(run_dir)[-1], log(run_dir))
    return run_dir


def figures(*run_dirs: Path) -> dict[int, dict[str, float]]:
    """Metrics of each step that are no measurements; those of a later attempt count."""
    return {
        event["step"]: {name: value for name, value in event["values"].items() if name not in CLOCKS}
        for one in run_dirs
        for event in events(one, "metrics")
    }
