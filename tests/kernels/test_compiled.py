"""The Triton kernels as every GPU would get them: compiled here without one, and held to the committed table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.hardware.tables.arch import lookup
from core.train.kernels.triton.compiled import table
from core.train.kernels.triton.compiled.table import KernelRow

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")

ROW = KernelRow("nf4.dequantize", "nf4", "gfx942", 4, 20, 38, 0, 0, 0, 8, "64×4", "128×1", 0, 0, 1024)


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )


def test_every_kernel_on_every_target_is_as_the_table_says() -> None:
    """No spill, no scratch memory, no more local memory than there is, and no line that review has not seen. After a
    change that is meant: `python -m core.train.kernels.triton.compiled --write`, `make docs`."""
    done = _python("-m", "core.train.kernels.triton.compiled", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_has_every_kernel_on_every_target_and_no_fault() -> None:
    rows = table.read()
    assert {row.kernel for row in rows} == {
        "nf4.dequantize", "int8.dequantize", "gemv.nf4", "gemv.int8", "loss.loss_rows",
        "block.norm", "block.norm_grad", "block.gate", "block.gate_grad", "block.turn",
    }  # fmt: skip
    for case in {(row.kernel, row.case) for row in rows}:
        assert [row.target for row in rows if (row.kernel, row.case) == case] == list(table.TARGETS)
    assert not [fault for row in rows for fault in table.faults(row)]


# --- what the check is worth -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = _python("-m", "tests.support.greedy_kernel", str(tmp_path_factory.mktemp("compiled")))
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("target", ["gfx1100", "sm_90"])
def test_a_kernel_that_spills_is_a_fault(found: dict[str, Any], target: str) -> None:
    (row,) = found[f"greedy.{target}"]["rows"]
    words = " ".join(found[f"greedy.{target}"]["faults"])
    assert row["spills"] > 0 and row["scratch"] > 0
    assert f"(too much) on {target} spills" in words and "scratch memory" in words


def test_a_row_is_compiled_once_and_anew_when_it_changes_or_is_damaged(found: dict[str, Any]) -> None:
    assert found["cache"]["compiled"] == [1, 0, 1, 1] and found["cache"]["equal"]
    row = found["cache"]["row"]
    assert row["loads"] == row["stores"] == "128×1"  # 256 floats, one wave of 64 lanes
    assert row["warps"] == 1 and row["waves"] == 8 and row["spills"] == row["scratch"] == row["matrix"] == 0


def test_two_cases_of_one_form_have_a_row_each(found: dict[str, Any]) -> None:
    one, other = found["twice"]["registers"]
    assert one == other > 0 and found["twice"]["compiled"] == 2


def test_tensors_without_memory_are_launched_as_real_ones_are(found: dict[str, Any]) -> None:
    for forms in found["forms"].values():
        for name in ("nf4", "loss"):
            without, real = forms[name]
            assert without == real


def test_two_gibibytes_and_more_are_told_apart_as_at_run_time(found: dict[str, Any]) -> None:
    """Under 2 GiB ROCm's compiler may use 32-bit offsets (buffer loads); from there on it may not."""
    small, large = (found["forms"]["gfx942"][name] for name in ("nf4", "large"))
    assert "tt.pointer_range" in str(small[0][2]) and "tt.pointer_range" not in str(large[2][:1])
    assert "tt.pointer_range" not in str(found["forms"]["sm_90"]["nf4"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spills": 3}, "nf4.dequantize (nf4) on gfx942 spills 3 registers"),
        ({"scratch": 16}, "needs 16 bytes of scratch memory"),
        ({"lds": 64 * 1024 + 1}, "more than the 64 KiB"),
        ({"waves": 0}, "does not fit"),
        ({"target": "sm_90", "spills": 8}, "spills 8 bytes"),
    ],
)
def test_faults_of_a_row(change: dict[str, Any], words: str) -> None:
    assert not table.faults(ROW)
    (fault,) = table.faults(replace(ROW, **change))
    assert words in fault


def test_a_difference_is_told_by_column(tmp_path: Path) -> None:
    other = replace(ROW, target="gfx1100")
    table.write([ROW, other], tmp_path / "table.csv")
    kept = table.read(tmp_path / "table.csv")
    assert kept == [ROW, other] and not table.differences(kept, [other, ROW])
    assert table.differences(kept, [replace(ROW, vgprs=24, loads="32×8"), replace(ROW, case="new")]) == [
        "nf4.dequantize (nf4) on gfx942: vgprs 20 → 24, loads 64×4 → 32×8",
        "nf4.dequantize (new) on gfx942: not in the table",
        "nf4.dequantize (nf4) on gfx1100: in the table, but no longer compiled",
    ]
    assert table.read(tmp_path / "none.csv") == []


def test_targets_are_architectures_that_are_known() -> None:
    assert [lookup(target) is not None for target in table.TARGETS] == [True] * 7


def test_without_the_right_compiler_it_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("__version__ = '2.0.0'")
    code = (
        "import sys; from pathlib import Path; from core.train.kernels.triton.compiled import __main__ as tool;"
        f"tool.ROOT = Path({str(tmp_path)!r}); sys.path.insert(0, {str(tmp_path)!r}); print(tool._triton())"
    )
    done = _python("-c", code)
    assert "The table is of Triton 3.9.0, and this is 2.0.0" in done.stdout, done.stderr
