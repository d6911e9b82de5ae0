"""What the end of a child means, row by row."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from core.jobs.admission import oom_backoff
from core.jobs.lifecycle.finish import Failed, NoRoom, Requeued, Succeeded
from core.spec.run.exit_codes import EXIT_NO_SPACE
from worker.attempt.outcome import read

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
        (-11, None, "machine", "segfault"),
        (-15, None, "machine", "terminated"),
        (-64, None, "machine", "killed"),
    ],
)
def test_other_ends_are_failures(code: int, last: dict[str, Any] | None, failure: str, name: str) -> None:
    outcome = read(code, last, asked=None, out_of_memory=False)
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.code) == (failure, name)


def test_an_out_of_memory_kill_is_told_from_an_operators() -> None:
    on_cpu = read(-9, None, asked=None, out_of_memory=True, batch_helps=True)
    assert isinstance(on_cpu, Failed)
    assert (on_cpu.failure, on_cpu.code, on_cpu.field) == ("memory", "host_out_of_memory", oom_backoff.BATCH)
    elsewhere = read(-9, None, asked=None, out_of_memory=True)
    assert isinstance(elsewhere, Failed)
    assert (elsewhere.failure, elsewhere.code) == ("machine", "host_out_of_memory")
    assert "SIGKILL" in str(read(-9, None, asked=None, out_of_memory=False))


DEATHS = {
    "signal.raise_signal(signal.SIGSEGV)": ("segfault", "SIGSEGV"),
    "ctypes.string_at(0)": ("segfault", "SIGSEGV"),
    "signal.raise_signal(signal.SIGBUS)": ("bus_error", "SIGBUS"),
    "m = mmap.mmap(f.fileno(), 4096); f.truncate(0); m[0]": ("bus_error", "SIGBUS"),
    "os.abort()": ("aborted", "SIGABRT"),
    "signal.raise_signal(signal.SIGILL)": ("illegal_instruction", "SIGILL"),
    "signal.raise_signal(signal.SIGFPE)": ("arithmetic", "SIGFPE"),
    "os.kill(os.getpid(), signal.SIGKILL)": ("killed", "SIGKILL"),
    "os.kill(os.getpid(), signal.SIGTERM)": ("terminated", "SIGTERM"),
    "os.kill(os.getpid(), signal.SIGXCPU)": ("killed", "SIGXCPU"),
    "os.kill(os.getpid(), 40)": ("killed", "signal 40"),
    "sys.exit(3)": ("crashed", "exit status 3"),
    "os._exit(1)": ("crashed", "without saying why"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_real_deaths_become_words(death: str) -> None:
    code = f"import ctypes, mmap, os, signal, sys, tempfile; f = tempfile.TemporaryFile(); f.truncate(4096); {death}"
    process = subprocess.run([sys.executable, "-c", code], preexec_fn=_no_core)
    outcome = read(process.returncode, None, asked=None, out_of_memory=False)
    assert isinstance(outcome, Failed)
    name, words = DEATHS[death]
    assert (outcome.code, outcome.failure) == (name, "internal" if name == "crashed" else "machine")
    assert words in outcome.message and "log" in outcome.message
    # Any of them is a hand-back when we had asked it to go, and a hang when that is why it was killed.
    assert isinstance(read(process.returncode, None, asked="a test", out_of_memory=False), Requeued)
    hung = read(process.returncode, None, asked=None, out_of_memory=False, hung="it hung: no sign of life for 9 s")
    assert isinstance(hung, Failed) and (hung.failure, hung.code) == ("machine", "hung")


def _no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def test_a_full_disk_is_not_a_failure() -> None:
    told = {"type": "error", "failure": "machine", "code": "no_space", "message": "no space left: weights"}
    assert read(EXIT_NO_SPACE, told, asked=None, out_of_memory=False) == NoRoom("no space left: weights")
    assert isinstance(read(EXIT_NO_SPACE, None, asked="its worker is leaving", out_of_memory=False), NoRoom)


@pytest.mark.parametrize("code", [75, 76, -9, -15, 1, 0, 143])
def test_a_child_that_was_told_to_go_hands_back(code: int) -> None:
    outcome = read(code, None, asked="worker on box is leaving", out_of_memory=False)
    assert isinstance(outcome, Requeued)
    assert "leaving" in outcome.why or "silent" in outcome.why


def test_work_that_was_done_when_the_wish_to_stop_came_is_kept() -> None:
    assert isinstance(read(0, RESULT, asked="worker on box is leaving", out_of_memory=False), Succeeded)


def test_a_child_that_leaves_unasked_hands_back() -> None:
    assert isinstance(read(75, None, asked=None, out_of_memory=False), Requeued)
    assert isinstance(read(76, None, asked=None, out_of_memory=False), Requeued)
