"""On a GPU PyTorch raises at every wait of the host for the device: a training step has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.spec.run.exit_codes import EXIT_OK
from core.train.base.async_metrics import AsyncMetrics, seconds_between, timestamp
from core.train.recipe import run
from tests.support.trainer import events, log, pairs, write_rows, write_run
from tests.support.waiting import Watching

STEPS = 6


@pytest.mark.parametrize(
    "axes",
    [
        {
            "method": {"type": "qlora", "r": 4, "lora_dropout": 0.1},
            "memory": {"type": "resident", "gradient_checkpointing": True},
        },
        {"method": {"type": "lora", "r": 4}, "batching": {"type": "packed", "tokens_per_batch": 64}},
        {"method": "full"},
    ],
    ids=["qlora", "packed lora", "full"],
)
def test_no_step_waits_for_the_device(
    tmp_path: Path, tiny_dir: Path, device: torch.device, axes: dict[str, Any]
) -> None:
    training = {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    where = {"accelerator": "gpu" if device.type == "cuda" else "cpu"}
    rows = write_rows(tmp_path / "rows.jsonl", pairs(12))
    run_dir = write_run(tmp_path / "run", tiny_dir, rows, training=training, resources=where, **axes)
    watching = Watching(run_dir, device, STEPS)
    try:
        assert run(run_dir, watching) == EXIT_OK, f"{events(run_dir)[-1]} {log(run_dir)}"
    finally:
        watching.close()
    assert watching.steps >= STEPS - 3 and not watching.calls
    told = events(run_dir, "metrics")
    assert [event["step"] for event in told] == list(range(1, STEPS + 1))
    assert all(event["values"]["tokens_per_second"] > 0 for event in told)


def test_figures_come_in_order_and_no_further_behind_than_agreed(device: torch.device) -> None:
    readings, told = AsyncMetrics[int](device, behind=1), list[tuple[int, dict[str, float]]]()
    busy = torch.randn(2048, 2048, device=device)
    began = timestamp(device)
    for step in range(5):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        readings.put(step, {"step": torch.full((), float(step), device=device), "third": busy.sum() * 0 + 1 / 3})
        told += readings.ready()
        assert len(told) >= step
    told += readings.all()
    assert [about for about, _ in told] == [0, 1, 2, 3, 4] == [values["step"] for _, values in told]
    assert 0 < seconds_between(began, timestamp(device)) < 600
