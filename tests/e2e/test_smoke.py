"""`make smoke` on this machine: every part runs, and what does not hold is told and fails it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import smoke as bench
from tests.support.service import ROOT

Told = tuple[int, str]
"""Exit status, and what was printed."""


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Told]]:
    """`python -m bench.smoke` in the test's process: with its OMP_NUM_THREADS of one thread, the service is forks of
    what the tests have imported. That the command starts by itself is for the last test here."""
    monkeypatch.setenv("EFT_HARDWARE_SMOKE", "1")
    before = signal.getsignal(signal.SIGTERM)

    def run(model: Path, into: Path, *more: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["smoke", "--model", str(model), "--report", str(into), *more])
        code = bench.main()
        said = capsys.readouterr()
        return code, said.out + said.err

    yield run
    signal.signal(signal.SIGTERM, before)


def parts(into: Path) -> dict[str, dict[str, Any]]:
    (path,) = into.glob("smoke-*.json")
    report = json.loads(path.read_text())
    assert str(Path.home()) not in path.read_text(), "the report is sent to others"
    return {part["part"]: part for part in report["parts"]} | {"": {"ok": report["ok"]}}


@pytest.mark.timeout(280)
def test_smoke_ends_well_and_leaves_a_report(tiny_dir: Path, tmp_path: Path, smoke: Callable[..., Told]) -> None:
    into = tmp_path / "report"
    code, told = smoke(tiny_dir, into, "--epochs", "6", "--skip", "bench")
    assert code == 0, told
    found = parts(into)
    assert found["train, killed in the middle"]["resumed_at_step"] >= [5]
    assert found["train, undisturbed"]["resumed_at_step"] == []
    assert found["the two compared"]["weights"] == "bitwise the same", "which is what a CPU promises"
    assert found["the two compared"]["largest_loss_difference"] == 0
    assert 0 <= found["merged"]["distance"] <= found["merged"]["tolerance"]
    assert found["bench"]["skipped"] and found[""]["ok"]


@pytest.mark.timeout(280)
def test_what_does_not_hold_fails_it(tmp_path: Path, smoke: Callable[..., Told]) -> None:
    (tmp_path / "empty").mkdir()
    killed = "train, killed in the middle"  # a second job that fails as the other does
    code, told = smoke(tmp_path / "empty", tmp_path / "report", "--skip", "bench", killed)
    assert code == 1 and "NOT ALL OF IT HELD" in told
    assert not parts(tmp_path / "report")["train, undisturbed"]["ok"]
    assert parts(tmp_path / "report")["doctor"]["ok"]


def test_it_does_not_start_unasked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.smoke", "--model", str(tmp_path), "--report", str(tmp_path / "report")],
        cwd=ROOT,
        env=os.environ | {"EFT_HARDWARE_SMOKE": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 2 and "EFT_HARDWARE_SMOKE=1" in done.stdout + done.stderr
