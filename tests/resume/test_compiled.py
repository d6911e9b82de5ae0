"""Compiled blocks: a run that is stopped and resumed with the code of its first attempt ends with the same bits, and
blocks that cannot be compiled are computed as they are, which is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.train.kernels.fused.modules import FusedParts
from core.train.recipe import run
from tests.resume.test_resume import AXES, StopAt
from tests.support.trainer import events, notices, pairs, weights, write_rows, write_run

COMPILED: dict[str, Any] = AXES | {
    "method": {"type": "qlora", "r": 4, "lora_dropout": 0.1},
    "memory": {"gradient_checkpointing": True},
    "training": AXES["training"] | {"max_steps": 4, "compile": True, "precision": "fp32"},
}
EAGER: dict[str, Any] = COMPILED | {"training": COMPILED["training"] | {"compile": False}}


def record(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = events(run_dir, "run_record")[0]["record"]["compile"]
    return found


def test_a_resumed_run_ends_with_the_same_bits_by_the_code_that_was_kept(tiny_dir: Path, tmp_path: Path) -> None:
    rows, cache = write_rows(tmp_path / "train.jsonl", pairs(27)), tmp_path / "cache"
    calm = write_run(tmp_path / "calm", tiny_dir, rows, cache_dir=cache, **COMPILED)
    assert run(calm) == EXIT_OK, events(calm)[-1]
    assert record(calm)["cache"] == "new" and record(calm)["compiled"] == record(calm)["blocks"] == 2
    assert len(record(calm)["graphs"]) == 1, "blocks of one kind share their code"

    eager = write_run(tmp_path / "eager", tiny_dir, rows, **EAGER)
    assert run(eager) == EXIT_OK, events(eager)[-1]
    for name in ("loss", "grad_norm"):
        of_both = zip(events(calm, "metrics"), events(eager, "metrics"), strict=True)
        gaps = [abs(one["values"][name] / other["values"][name] - 1) for one, other in of_both]
        assert len(gaps) == 4 and max(gaps) < 1e-4, (name, gaps)

    left = write_run(tmp_path / "left", tiny_dir, rows, cache_dir=cache, **COMPILED)
    assert run(left, StopAt(6, left)) == EXIT_CHECKPOINTED, events(left)[-1]
    again = write_run(tmp_path / "again", tiny_dir, rows, cache_dir=cache, resume_from=[left], **COMPILED)
    assert run(again) == EXIT_OK, events(again)[-1]
    assert record(again)["cache"] == "found"
    assert not notices(again), "neither drift nor a fallback"
    assert weights(again) == weights(calm)


def test_without_a_compiler_blocks_are_computed_as_they_are_and_it_is_told(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "train.jsonl", pairs(9))
    calm = write_run(tmp_path / "calm", tiny_dir, rows, **EAGER)
    # No part is fused for a run that asks for compiled blocks (docs/kernels.md).
    monkeypatch.setattr("core.train.model.build.fuse_parts", lambda *_: FusedParts("portable"))
    assert run(calm) == EXIT_OK, events(calm)[-1]
    monkeypatch.setenv("PATH", str(tmp_path))
    without = write_run(tmp_path / "without", tiny_dir, rows, **COMPILED)
    assert run(without) == EXIT_OK, events(without)[-1]
    (notice,) = notices(without)
    assert notice["code"] == "compile_fallback" and "no C++ compiler" in notice["message"]
    (reason,) = record(without)["eager"]
    assert "no C++ compiler" in reason and record(without)["compiled"] == 0
    assert weights(without) == weights(calm)
