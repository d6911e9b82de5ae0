"""Which ends of a member the supervisor puts up with: real processes that end as they are told."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from box.instance import Instance
from box.process import ManagedProcess
from box.up import EXIT_CONFIG, EXIT_NOT_NOW, MAX_BACKOFF_SECONDS, MAX_FAILURES, GivesUp, Supervisor
from core.settings import Settings


def supervisor(folder: Path, code: int) -> tuple[Supervisor, ManagedProcess]:
    """One whose only member ends with `code` as soon as it is started."""
    data = folder / "data"
    data.mkdir()
    watching = Supervisor(Settings(data=data), Instance.take(data, patience=0), None)
    command = [sys.executable, "-S", "-c", f"raise SystemExit({code})"]
    member = ManagedProcess("worker", command, dict(os.environ), folder, folder / "worker.log")
    watching.members.append(member)
    return watching, member


def ends(watching: Supervisor, member: ManagedProcess, times: int) -> None:
    """Start it and see it end, so many times, without the waits between."""
    for _ in range(times):
        member.next_start = 0.0
        watching._look()
        assert member.process is not None
        member.process.wait(120)
        watching._look()


def test_one_that_fails_to_start_is_given_up(tmp_path: Path) -> None:
    watching, member = supervisor(tmp_path, 1)
    with pytest.raises(GivesUp, match=f"ended {MAX_FAILURES} times in a row"):
        ends(watching, member, MAX_FAILURES)


def test_one_that_would_only_do_so_again_is_given_up_at_once(tmp_path: Path) -> None:
    watching, member = supervisor(tmp_path, EXIT_CONFIG)
    with pytest.raises(GivesUp, match="exit status 78"):
        ends(watching, member, 1)


def test_one_that_waits_for_the_database_is_not(tmp_path: Path) -> None:
    watching, member = supervisor(tmp_path, EXIT_NOT_NOW)
    ends(watching, member, 2 * MAX_FAILURES)
    assert 0 < member.next_start - time.monotonic() <= MAX_BACKOFF_SECONDS
