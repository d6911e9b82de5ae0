"""Every stage and every optimizer on `device.type == "cuda"`, held to the CPU: two steps of the tiny model each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load_file

from core.spec.axes.optimizer import Optimizer
from core.spec.axes.stage import Stage
from core.spec.run.exit_codes import EXIT_OK
from tests.rehearsal.support import train
from tests.support.preferences import judged, preferences
from tests.support.rewards import solutions
from tests.support.trainer import PLAIN, events, log, pairs, weights_file, write_rows, write_run

STAGES: dict[str, Any] = {arm.model_fields["type"].default: arm for arm in get_args(get_args(Stage)[0])}
OPTIMIZERS = [arm.model_fields["type"].default for arm in get_args(get_args(Optimizer)[0])]
OPTIMIZERS.remove("sophia_g")  # draws labels with the device's own generator: other labels than on a CPU
ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt_completion": pairs(4),
    "text": [{"text": row["prompt"] + row["completion"]} for row in pairs(4)],
    "preference": preferences(4),
    "kto": judged(4),
    "stepwise": solutions(4),
    "prompt": [{"prompt": f"say a letter, number {number}", "reference": "a"} for number in range(4)],
}
"""Row format → rows; a stage takes the first of its formats that is here."""
NEEDED: dict[str, dict[str, Any]] = {
    "grpo": {
        "reward": [{"type": "regex", "pattern": "[a-f]"}], "num_generations": 2, "max_completion_length": 6,
        "temperature": 1.5,
    },
    "rloo": {
        "reward": [{"type": "regex", "pattern": "[a-f]"}], "num_generations": 2, "max_completion_length": 6,
        "temperature": 1.5,
    },
    "ppo": {
        "reward": [{"type": "regex", "pattern": "[a-f]"}], "num_iterations": 2, "max_completion_length": 6,
        "temperature": 1.5,
    },
}  # fmt: skip
"""Fields that a stage cannot do without, or only slowly."""
OFF = {"optimizer adamw_8bit": 1e-7, "optimizer adamw_4bit": 1e-7}
"""Rows that differ from the CPU, by how much at most, relative to the largest weight of a tensor. The kernels here are
torch's for the CPU, whose square root may be an ulp off; these optimizers take it through float64 on a CPU alone."""


def trained(folder: Path, model: Path, accelerator: str, stage: str, axes: dict[str, Any]) -> Path:
    row_format = next(each for each in STAGES[stage].rows if each in ROWS)
    path = write_rows(folder.with_suffix(".jsonl"), ROWS[row_format])
    run_dir = write_run(
        folder, model, path, stage={"type": stage, **NEEDED.get(stage, {})}, resources={"accelerator": accelerator},
        data={"train": {"type": "path", "path": str(path), "format": row_format}, "rendering": PLAIN},
        training={"max_steps": 2, "per_device_train_batch_size": 2, "max_length": 64, "precision": "bf16"}, **axes,
    )  # fmt: skip
    assert train(run_dir) == EXIT_OK, (events(run_dir)[-1], log(run_dir))
    return run_dir


@pytest.mark.parametrize("name", [*(f"stage {each}" for each in STAGES), *(f"optimizer {each}" for each in OPTIMIZERS)])
def test_two_steps_are_the_cpus(tmp_path: Path, tiny_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, _, which = name.partition(" ")
    axes: dict[str, Any] = {"method": {"type": "lora", "r": 4}, "optimizer": {"learning_rate": 1e-2}}
    if kind == "optimizer":
        axes = {"method": "full", "optimizer": {"type": which, "learning_rate": 1e-3}}
    stage = which if kind == "stage" else "sft"
    here = trained(tmp_path / "gpu", tiny_dir, "gpu", stage, axes)
    packing = events(here, "run_record")[0]["record"].get("packing") or {}
    if kind == "stage" and "why" in packing.get(
        "prompts", {}
    ):  # each answer by itself, as the record says: so here too
        monkeypatch.setattr("core.train.recipe.share_prompts", lambda *_: packing["prompts"]["why"])
    there = trained(tmp_path / "cpu", tiny_dir, "cpu", stage, axes)
    assert events(here, "run_record")[0]["record"]["environment"]["device"] == "cuda"
    losses = [[event["values"]["loss"] for event in events(folder, "metrics")] for folder in (here, there)]
    assert losses[0] == pytest.approx(losses[1], rel=OFF.get(name, 0), abs=0) and len(losses[0]) == 2
    tensors = [load_file(weights_file(folder)) for folder in (here, there)]
    for tensor, wanted in tensors[1].items():
        gap = (tensors[0][tensor].float() - wanted.float()).abs().max()
        assert gap <= OFF.get(name, 0) * wanted.abs().max(), tensor
