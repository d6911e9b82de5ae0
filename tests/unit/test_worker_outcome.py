"""What the end of a child means, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from core.jobs.finish import Failed, HandedBack, Succeeded
from worker.outcome import read

RESULT = {"type": "result", "result": {"train_loss": 1.0}, "artifacts": [{"path": "a"}]}
ERROR = {
    "type": "error",
    "failure": "memory",
    "code": "out_of_memory",
    "message": "smaller batch",
    "field": "training",
}


def test_a_result_is_success() -> None:
    assert read(0, RESULT, asked=None, out_of_memory=False) == Succeeded({"train_loss": 1.0}, [{"path": "a"}])


def test_an_error_event_is_the_failure_it_says() -> None:
    assert read(1, ERROR, asked=None, out_of_memory=False) == Failed(
        "memory", "out_of_memory", "smaller batch", "training"
    )


@pytest.mark.parametrize(
    ("code", "last", "failure", "name"),
    [
        (0, None, "internal", "no_result"),
        (0, ERROR, "internal", "no_result"),
        (1, None, "internal", "crashed"),
        (1, RESULT, "internal", "crashed"),
        (3, None, "internal", "crashed"),
        (-9, RESULT, "machine", "killed"),
        (-11, None, "machine", "killed"),
        (-15, None, "machine", "killed"),
        (-64, None, "machine", "killed"),
    ],
)
def test_other_ends_are_failures(code: int, last: dict[str, Any] | None, failure: str, name: str) -> None:
    outcome = read(code, last, asked=None, out_of_memory=False)
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.code) == (failure, name)


def test_an_out_of_memory_kill_is_told_from_an_operators() -> None:
    outcome = read(-9, None, asked=None, out_of_memory=True)
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.code) == ("machine", "host_out_of_memory")
    assert "SIGKILL" in str(read(-9, None, asked=None, out_of_memory=False))


@pytest.mark.parametrize("code", [75, 76, -9, -15, 1, 0, 143])
def test_a_child_that_was_told_to_go_hands_back(code: int) -> None:
    outcome = read(code, None, asked="worker on box is leaving", out_of_memory=False)
    assert isinstance(outcome, HandedBack)
    assert "leaving" in outcome.why or "silent" in outcome.why


def test_work_that_was_done_when_the_wish_to_stop_came_is_kept() -> None:
    assert isinstance(read(0, RESULT, asked="worker on box is leaving", out_of_memory=False), Succeeded)


def test_a_child_that_leaves_unasked_hands_back() -> None:
    assert isinstance(read(75, None, asked=None, out_of_memory=False), HandedBack)
    assert isinstance(read(76, None, asked=None, out_of_memory=False), HandedBack)
