"""A child process and all it starts: spawned, asked, ended, found again after its worker has died."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import HOME
from core.spec.run.orders import PrepareOrder
from tests.support.service import wait_for
from worker import processes
from worker.attempt.child import Child, write_order

ORDER = PrepareOrder.model_validate({"job_id": "job-1", "attempt": 1, "model": "team/tiny", "models_dir": "/m"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "job-1" / "attempt-1"
    write_order(path, ORDER)
    return path


@pytest.fixture
def child(folder: Path) -> Iterator[Child]:
    child = Child(folder, "tests.support.stubborn", {"PATH": os.environ["PATH"], "ONLY": "this"})
    yield child
    child.reap()


def helper(folder: Path) -> int:
    wait_for((folder / "ready").exists, 90, "the helper")
    return int(wait_for((folder / "ready").read_text, 60, "its number"))


def test_the_run_folder_is_this_users_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert PrepareOrder.model_validate_json((folder / "run.json").read_bytes()) == ORDER
    with pytest.raises(FileExistsError):
        write_order(folder, ORDER)  # an attempt runs once


def test_a_session_of_its_own_with_log_and_nothing_inherited(folder: Path, child: Child) -> None:
    helper(folder)
    seen = processes.look(child.pid)
    assert seen is not None
    assert (seen.session, seen.group, seen.started) == (child.pid, child.pid, child.started)
    assert (folder / "log.txt").read_text().splitlines() == [f"out {HOME}", "err"]
    assert stat.S_IMODE((folder / "log.txt").stat().st_mode) == 0o600
    environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
    assert {entry.partition(b"=")[0] for entry in environment if entry} == {b"PATH", b"ONLY"}
    open_files = {os.readlink(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()}
    assert not [name for name in open_files if name.endswith((".db", ".lock")) or "socket" in name]


def test_asking_goes_to_the_child_and_killing_to_all_it_started(folder: Path, child: Child) -> None:
    helper_pid = helper(folder)
    child.ask()
    assert not child.exited(0.3)
    assert {process.pid for process in processes.members(child.pid)} == {child.pid, helper_pid}
    assert child.reap() == -signal.SIGKILL
    assert processes.members(child.pid) == []
    child.beat(0.0)  # all of these are late, and go nowhere
    child.ask()
    child.kill()


def test_a_helper_does_not_outlive_the_child(folder: Path, child: Child) -> None:
    helper_pid = helper(folder)
    os.kill(child.pid, signal.SIGKILL)
    assert child.exited(60)
    assert processes.look(helper_pid) is not None
    child.reap()
    seen = processes.look(helper_pid)
    assert seen is None or not seen.alive


def test_an_orphan_is_found_by_its_run_folder_and_ended_with_its_session(folder: Path) -> None:
    spawn = [sys.executable, "-m", "tests.support.stubborn", str(folder)]
    with subprocess.Popen(spawn, cwd=HOME, start_new_session=True) as orphan:
        helper_pid = helper(folder)
        assert orphan.pid in {process.pid for process in processes.running_in(folder)}
        os.kill(orphan.pid, signal.SIGKILL)
        orphan.wait()
        # The leader is gone and reaped; its number still leads to the helper, and to nobody else.
        assert processes.look(orphan.pid) is None
        assert [process.pid for process in processes.members(orphan.pid)] == [helper_pid]
        assert processes.end_session(orphan.pid, 60)
        assert processes.members(orphan.pid) == []
