"""The contract of stages: further sums of a stage become metrics, over micro-steps, attempts and older checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train import recipe
from core.train.batch import Batch
from core.train.policy import PolicyModel
from core.train.stage import Loss, Totals
from core.train.stages.sft import SupervisedFineTuning
from core.train.state import TrainerState
from tests.support.trainer import events, pairs, run, write_rows, write_run
from tests.train.test_activations import InWindow

TRAINING = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_length": 64}


class WithRows(SupervisedFineTuning):
    """Counts rows beside the loss."""

    def loss(self, policy: PolicyModel, batch: Batch, totals: Totals) -> Loss:
        found = super().loss(policy, batch, totals)
        rows = torch.tensor(float(len(batch.lengths)), dtype=torch.float64)
        return Loss(found.total, {**found.sums, "rows": rows})

    def figures(self, sums: Mapping[str, float], totals: Totals) -> dict[str, float]:
        return super().figures(sums, totals) | {"rows": sums["rows"], "label_tokens": float(totals["label_tokens"])}


def test_sums_of_a_stage_are_metrics_whatever_interrupts_a_step(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "build_stage", lambda spec, data: WithRows())
    rows = write_rows(tmp_path / "rows.jsonl", pairs(18))
    axes: dict[str, Any] = {"training": TRAINING, "method": "lora"}
    straight = write_run(tmp_path / "straight", tiny_dir, rows, **axes)
    assert run(straight) == EXIT_OK
    first = write_run(tmp_path / "first", tiny_dir, rows, **axes)
    assert run(first, InWindow(first, 5)) == EXIT_CHECKPOINTED
    (resumed,) = (tmp_path / "first" / "checkpoints").glob("step-*")
    assert not resumed.name.endswith("step-00000001"), "it was stopped in the middle of a step"
    second = write_run(tmp_path / "second", tiny_dir, rows, resume_from=[first], **axes)
    assert run(second) == EXIT_OK
    told = [
        {event["step"]: [event["values"][name] for name in ("loss", "rows", "label_tokens")] for event in found}
        for found in (events(straight, "metrics"), [*events(first, "metrics"), *events(second, "metrics")])
    ]
    assert told[0] == told[1]
    assert [values[1] for values in told[0].values()] == [6.0, 6.0, 6.0]


def test_a_checkpoint_from_before_stages_had_sums_resumes() -> None:
    before = TrainerState(window_loss=1.5, window_tokens=7, tokens=70).state_dict()
    del before["window_sums"]
    state = TrainerState()
    state.load_state_dict(before)
    assert (state.window_loss, state.window_sums, state.tokens) == (1.5, {}, 70)
