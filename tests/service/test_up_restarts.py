"""Which ends of a member the supervisor puts up with: real processes that end as they are told."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from box.fork_server import MemberForkServer
from box.instance import Instance
from box.process import ManagedProcess
from box.up import EXIT_CONFIG, EXIT_NOT_NOW, MAX_BACKOFF_SECONDS, MAX_FAILURES, GivesUp, Supervisor
from core.base.forks import Forked
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
        member.process.wait()
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


def test_a_member_is_forked_and_without_the_fork_server_it_starts_cold(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The member prints what platform it is on, and ends."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    forks = MemberForkServer(environment | {"SECRET": "no"}, tmp_path / "forks.log", ["platform"])
    try:
        forks.await_ready(lambda: False)
        server = forks.pid
        assert server is not None
        command = [sys.executable, "-m", "platform"]
        member = ManagedProcess("api", command, environment, tmp_path, tmp_path / "api.log", forks=forks)
        said = []
        for end_before in (False, True):
            if end_before:
                os.kill(server, signal.SIGKILL)
            member.start()
            assert member.process is not None
            assert isinstance(member.process, Forked) is not end_before
            assert os.getsid(member.process.pid) == member.process.pid
            assert Path(f"/proc/{member.process.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(
                os.getpid()
            )
            assert member.process.wait() == 0
            said.append(member.log.read_text())
        assert said[0].startswith("Linux") and said[1] == 2 * said[0]
        assert "start cold from now on" in capfd.readouterr().err
    finally:
        forks.stop()


def test_a_variable_that_is_read_at_the_start_of_a_process_needs_a_cold_one(tmp_path: Path) -> None:
    environment = dict(os.environ)
    forks = MemberForkServer(environment, tmp_path / "forks.log", ["platform"])
    try:
        forks.await_ready(lambda: False)
        with (tmp_path / "log").open("wb") as log:
            assert forks.fork("platform", [], environment | {"LD_PRELOAD": ""}, log.fileno(), ()) is None
            assert forks.fork("platform", ["x" * 2000], environment, log.fileno(), ()) is None
            forked = forks.fork("platform", [], environment | {"HF_TOKEN": "x"}, log.fileno(), ())
            assert forked is not None and forked.wait() == 0
    finally:
        forks.stop()


def test_a_fork_server_that_cannot_import_leaves_the_members_to_a_cold_start(tmp_path: Path) -> None:
    forks = MemberForkServer(dict(os.environ), tmp_path / "forks.log", ["no_such_module"])
    forks.await_ready(lambda: False)
    with (tmp_path / "log").open("wb") as log:
        assert forks.fork("platform", [], dict(os.environ), log.fileno(), ()) is None
    assert "no_such_module" in (tmp_path / "forks.log").read_text()
    forks.stop()
