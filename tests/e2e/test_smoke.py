"""`make smoke` on this machine: every part runs, and what does not hold is told and fails it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.service import ROOT


def smoke(model: Path, into: Path, *more: str, asked: str = "1") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.smoke", "--model", str(model), "--report", str(into), *more],
        cwd=ROOT,
        env=os.environ | {"EFT_HARDWARE_SMOKE": asked},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.returncode, done.stdout + done.stderr


def parts(into: Path) -> dict[str, dict[str, Any]]:
    (path,) = into.glob("smoke-*.json")
    report = json.loads(path.read_text())
    assert str(Path.home()) not in path.read_text(), "the report is sent to others"
    return {part["part"]: part for part in report["parts"]} | {"": {"ok": report["ok"]}}


def test_smoke_ends_well_and_leaves_a_report(tiny_dir: Path, tmp_path: Path) -> None:
    into = tmp_path / "report"
    code, told = smoke(tiny_dir, into, "--epochs", "8", "--skip", "bench")
    assert code == 0, told
    found = parts(into)
    assert found["train, killed in the middle"]["resumed_at_step"] >= [5]
    assert found["train, undisturbed"]["resumed_at_step"] == []
    assert found["the two compared"]["weights"] == "bitwise the same", "which is what a CPU promises"
    assert found["the two compared"]["largest_loss_difference"] == 0
    assert 0 <= found["merged"]["distance"] <= found["merged"]["tolerance"]
    assert found["bench"]["skipped"] and found[""]["ok"]


def test_what_does_not_hold_fails_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, told = smoke(tmp_path / "empty", tmp_path / "report", "--skip", "bench")
    assert code == 1 and "NOT ALL OF IT HELD" in told
    assert not parts(tmp_path / "report")["train, undisturbed"]["ok"]
    assert parts(tmp_path / "report")["doctor"]["ok"]


def test_it_does_not_start_unasked(tmp_path: Path) -> None:
    code, told = smoke(tmp_path, tmp_path / "report", asked="")
    assert code == 2 and "EFT_HARDWARE_SMOKE=1" in told
