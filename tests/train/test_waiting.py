"""Nothing in a training step waits for the device; what diverges is found all the same, at its step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FAILED, EXIT_OK
from core.train.base.stop import Stop
from core.train.engine import Engine
from core.train.loop import report
from core.train.recipe import run
from core.train.stage import Loss
from tests.support.trainer import events, log, pairs, write_rows, write_run
from tests.support.waiting import Counting, Watching

STEPS = 5
AXES: dict[str, Any] = {
    "optimizer": {"learning_rate": 1e-3},
    "training": {"max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}


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
def test_no_step_waits_for_the_device(tmp_path: Path, tiny_dir: Path, axes: dict[str, Any]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", pairs(12))
    run_dir = write_run(tmp_path / "run", tiny_dir, rows, **AXES | axes)
    watching = Watching(run_dir, torch.device("cpu"), STEPS)
    assert run(run_dir, watching) == EXIT_OK, log(run_dir)
    assert watching.steps == STEPS - 2 and not watching.calls


def test_the_counter_counts() -> None:
    with Counting() as counting:
        values = torch.arange(4.0)
        float(values[0]), bool((values > 1).any()), values[values > 1], values.nonzero(), values.tolist()
    assert counting.calls == {"_local_scalar_dense": 2, "index": 1, "nonzero": 1}


class Late(report.AsyncMetrics[Any]):
    """A device that is two steps behind: nothing is there before it has to be."""

    def ready(self) -> Any:
        while len(self._sent) > 2:
            yield self._take()


@pytest.mark.parametrize("save_steps", [3, 50])
def test_a_step_that_diverged_is_named_however_late_it_is_read(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int
) -> None:
    """The third step breaks. Whether its figures are read because a checkpoint is due or two steps later: the message
    is the same, nothing of steps that followed is told, and no checkpoint is written."""
    monkeypatch.setattr(report, "AsyncMetrics", Late)
    real, calls = Engine.forward, [0]

    def forward(self: Any, *args: Any) -> Any:
        calls[0] += 1
        found = real(self, *args)
        return found if calls[0] != 3 else Loss(found.total * math.inf, {"loss": found.sums["loss"] * math.inf})

    monkeypatch.setattr(Engine, "forward", forward)
    rows = write_rows(tmp_path / "rows.jsonl", pairs(12))
    axes = AXES | {"training": AXES["training"] | {"gradient_accumulation_steps": 1, "max_steps": 8}}
    checkpoint = {"type": "disk", "save_steps": save_steps}
    run_dir = write_run(tmp_path / "run", tiny_dir, rows, method="full", checkpoint=checkpoint, **axes)
    assert run(run_dir) == EXIT_FAILED
    error = events(run_dir)[-1]
    assert error["code"] == "diverged" and error["message"].startswith("the loss became inf at step 3;")
    assert [event["step"] for event in events(run_dir, "metrics")] == [1, 2]
    assert not list((run_dir / "checkpoints").glob("*")) and calls[0] == (3 if save_steps == 3 else 5)


def test_figures_of_a_late_device_are_told_before_a_checkpoint(
    tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the ledger in the checkpoint has them: the next attempt goes on as if they had never been late."""
    rows = write_rows(tmp_path / "rows.jsonl", pairs(12))
    calm = write_run(tmp_path / "calm", tiny_dir, rows, method="full", **AXES)
    assert run(calm) == EXIT_OK
    monkeypatch.setattr(report, "AsyncMetrics", Late)
    first = write_run(tmp_path / "first", tiny_dir, rows, method="full", **AXES)
    assert run(first, LeaveAt(8, first)) == EXIT_CHECKPOINTED
    order = [event["type"] for event in events(first) if event["type"] in ("metrics", "checkpoint")]
    second = write_run(tmp_path / "second", tiny_dir, rows, method="full", resume_from=[first], **AXES)
    assert run(second) == EXIT_OK, log(second)
    told = [e["values"]["loss"] for folder in (first, second) for e in events(folder, "metrics")]
    assert order[-1] == "checkpoint" and len(order) > 2
    assert told == [e["values"]["loss"] for e in events(calm, "metrics")]
    keys = ("train_loss", "steps", "total_tokens")
    ours, wanted = (events(folder)[-1]["result"] for folder in (second, calm))
    assert [ours[key] for key in keys] == [wanted[key] for key in keys]


class LeaveAt(Stop):
    """Asked to leave at the n-th place in training where the run looks."""

    def __init__(self, place: int, run_dir: Path) -> None:
        self.left, self.run_dir = place, run_dir

    @property  # type: ignore[override]
    def requested(self) -> bool:
        self.left -= any(event["phase"] == "training" for event in events(self.run_dir, "phase"))
        return self.left < 0
