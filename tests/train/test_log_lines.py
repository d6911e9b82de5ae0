"""What `eft logs` shows of a run: which events have a line, how many lines steps have, and that no log ends a run."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest

from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def told(tmp_path: Path, *events: tuple[str, dict[str, Any]]) -> list[str]:
    """The lines without their times."""
    stream = io.StringIO()
    writer = EventWriter(tmp_path / "events.jsonl", LogLines(stream))
    for kind, payload in events:
        writer.write(kind, **payload)  # type: ignore[arg-type]
    writer.close()
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    return [line.partition(" ")[2] for line in lines]


def record(steps: int | None) -> tuple[str, dict[str, Any]]:
    return "run_record", {"record": {"total_steps": steps, "parameters": {"trained": 1024, "total": 135_000_000}}}


def step(number: int) -> tuple[str, dict[str, Any]]:
    values = {"loss": 3.0 / number, "learning_rate": 1e-4, "tokens_per_second": 1234.5, "padding_share": 0.1}
    return "metrics", {"step": number, "values": values}


def test_a_good_run_reads_as_what_happened(tmp_path: Path) -> None:
    lines = told(
        tmp_path,
        ("phase", {"phase": "loading"}),
        ("notice", {"code": "drift", "message": "other threads"}),
        record(2),
        ("evaluation", {"step": 0, "values": {"eval_loss": 2.5}}),
        step(1),
        ("alive", {}),
        ("checkpoint", {"step": 1, "path": "checkpoints/step-00000001"}),
        step(2),
        ("samples", {"step": 2, "samples": []}),
        ("result", {"result": {"steps": 2, "train_loss": 2.25, "eval_before": {"eval_loss": 2.5},
                               "eval_after": {"eval_loss": 1.25}}, "artifacts": []}),
    )  # fmt: skip
    assert lines == [
        "loading",
        "notice drift: other threads",
        "2 steps; 1,024 trained parameters of 135,000,000 in the model",
        "evaluation at step 0: eval_loss 2.5",
        "step 1/2: loss 3, learning_rate 0.0001, tokens_per_second 1234",
        "checkpoint at step 1",
        "step 2/2: loss 1.5, learning_rate 0.0001, tokens_per_second 1234",
        "done: 2 steps, train_loss 2.25, eval_loss 2.5 to 1.25",
    ]


@pytest.mark.parametrize("steps", [7, 100, 101, 12_345])
def test_long_runs_have_as_many_lines_as_short_ones(tmp_path: Path, steps: int) -> None:
    lines = told(tmp_path, record(steps), *(step(number) for number in range(1, steps + 1)))
    shown = [int(line.split("/")[0].split()[1]) for line in lines if line.startswith("step")]
    assert shown[0] == 1 and shown[-1] == steps and min(steps, 50) <= len(shown) <= 102
    assert steps > 100 or shown == list(range(1, steps + 1))


def test_a_run_whose_length_nobody_knows_and_downloads(tmp_path: Path) -> None:
    whole = 10_000
    lines = told(
        tmp_path,
        *(step(number) for number in range(1, 50)),
        ("phase", {"phase": "downloading"}),
        *(("progress", {"bytes": done, "total_bytes": whole}) for done in range(0, whole + 1, 100)),
        ("progress", {"step": 1, "total_steps": 2}),
    )
    assert lines == [
        "step 1: loss 3, learning_rate 0.0001, tokens_per_second 1234",
        "downloading",
        "0 of 10,000 bytes",
        "10,000 of 10,000 bytes",
    ]


def test_a_failure_is_a_sentence(tmp_path: Path) -> None:
    error = {"failure": "user", "code": "invalid_data", "message": "line 3: no text", "field": "line 3"}
    assert told(tmp_path, ("error", error)) == ["error invalid_data (user): line 3: no text"]


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events.jsonl", LogLines(Full()))
    assert writer.write("phase", phase="loading") == 1
    assert (tmp_path / "events.jsonl").read_text().count("loading") == 1
