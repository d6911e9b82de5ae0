"""The self-test and what follows from it on a real card: every part, a worker's child, precisions side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.hardware import selftest
from core.hardware.discover import discover
from core.hardware.tables.arch import lookup
from core.spec.run.exit_codes import EXIT_OK
from core.train.recipe import run
from core.train.selftest.measure import SelftestCheck
from core.train.selftest.run import checks, measure
from tests.support.trainer import events, pairs, write_rows, write_run
from worker.environment import child_environment
from worker.gpus.selftest_runner import SelfTestDevice, examine


def _checks() -> list[SelftestCheck]:
    import os

    return checks(torch.device(os.environ.get("EFT_TEST_DEVICE", "cuda")))


@pytest.mark.parametrize("check", _checks(), ids=lambda check: check.name)
def test_every_part_passes_or_is_not_to_be_had(device: torch.device, check: SelftestCheck) -> None:
    part = measure(check, device)
    assert part["status"] in ("passed", "unavailable"), part
    if part["status"] == "unavailable":
        assert part["error"]


def test_the_workers_child_comes_to_the_same(device: torch.device, tmp_path: Path) -> None:
    """With the environment of a trainer, as at a worker's start. A card of the table has what the table promises."""
    gpu = discover().gpus[0] if device.type == "cuda" else None
    tried = SelfTestDevice("slot", gpu, child_environment("train", gpu=gpu, threads=2, root=tmp_path))
    verdict = examine(tried, "box", tmp_path, 180.0)
    assert verdict.ok, verdict.failures
    row = lookup(tried.arch)
    choice = selftest.choose(verdict)
    assert row is not None, f"{tried.arch} is not in the table of architectures yet"
    assert ("bf16" in choice.precisions) or not row.bf16
    assert choice.limits == selftest.NO_LIMITS
    if row.attention in ("flash", "opt_in") and device.type == "cuda":
        assert "flash" in choice.attention["bf16"]


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.03), ("fp16", 0.01), ("fp8", 0.08)])
def test_a_run_takes_float32s_way(
    device: torch.device, tiny_dir: Path, tmp_path: Path, precision: str, tolerance: float
) -> None:
    """Stated tolerance: of each loss of six steps, full fine-tuning."""
    rows = write_rows(tmp_path / "rows.jsonl", pairs(16))
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    losses: dict[str, list[Any]] = {}
    for each in ("fp32", precision):
        training = {"max_steps": 6, "per_device_train_batch_size": 4, "max_length": 64, "precision": each}
        run_dir = write_run(
            tmp_path / each, tiny_dir, rows, method="full", optimizer={"learning_rate": 1e-3}, training=training,
            resources={"accelerator": accelerator},
        )  # fmt: skip
        assert run(run_dir) == EXIT_OK, events(run_dir, "error")
        record = events(run_dir, "run_record")[0]["record"]
        notice = [event["message"] for event in events(run_dir, "notice") if event["code"] == "precision_fallback"]
        assert record["environment"]["precision"] == each or notice, "a fallback is told"
        losses[each] = [event["values"]["loss"] for event in events(run_dir, "metrics")]
    torch.testing.assert_close(losses[precision], losses["fp32"], rtol=tolerance, atol=0)
