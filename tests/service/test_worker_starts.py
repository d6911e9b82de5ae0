"""No result depends on how its trainer was started: cold, as a spare that had imported everything, or forked.

These processes really start. They have two threads each: a parallel region of OpenMP in a fork server would leave its
children hanging.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from core.hardware import device_mask
from core.jobs.kinds import Kind
from tests.support import selftest, trainer
from tests.support.service import wait_for
from tests.support.starts import DIRTY, TRAINER, environ, finish, fork, forking, idle, keeping, pid_of, write_run
from worker import processes
from worker.attempt.child import Child
from worker.environment import child_environment

AXES: dict[str, Any] = {"method": {"type": "lora", "lora_dropout": 0.1}}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("starts")
    selftest.lay(root, "box")
    return child_environment(Kind.TRAIN, gpu=None, threads=2, root=root, inherited=DIRTY)


@pytest.fixture(scope="module")
def cold(environment: dict[str, str], tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a child that starts by itself."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "cold", tiny_dir, **AXES)
    assert finish(Child(folder, TRAINER, environment)) == 0, trainer.log(folder)
    return folder


def check_alike(warm: Path, cold: Path) -> None:
    """The same weights to the bit, and the same told on the way."""
    assert trainer.weights(warm) == trainer.weights(cold)
    kinds = [
        [event["type"] for event in trainer.events(folder) if event["type"] != "progress"] for folder in (warm, cold)
    ]
    assert kinds[0] == kinds[1]


def test_a_spare_becomes_the_child_of_a_run_and_the_result_is_the_cold_ones_to_the_bit(
    tiny_dir: Path, tmp_path: Path, environment: dict[str, str], cold: Path
) -> None:
    warm, second = (write_run(tmp_path / name, tiny_dir, **AXES) for name in ("warm", "second"))
    enough = threading.Event()
    with keeping(environment, enough.is_set) as spares:
        pid = idle(spares)
        enough.set()
        seen = environ(pid)
        assert seen == environment, "the environment of any child, at exec and so for good"
        assert not [value for value in seen.values() if "hunter2" in value]
        assert {name: seen[name] for name in device_mask.ALL if name in seen} == {"CUDA_VISIBLE_DEVICES": "-1"}
        files = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
        assert not [name for name in files if name.endswith((".db", ".lock")) or "nvidia" in name or "kfd" in name]

        assert "/torch/" in Path(f"/proc/{pid}/maps").read_text(), "what takes a start its seconds is done"
        child = spares.take(warm, environment)
        assert child is not None and child.pid == pid
        assert spares.take(second, environment) is None, "there is one, and nobody waits for the next"
        wait_for(lambda: processes.running_in(warm), 60, "its command line")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert command == [os.fsencode(part) for part in (sys.executable, "-m", TRAINER, warm)]
        member = processes.look(pid)
        assert member is not None and (member.session, member.group, member.started) == (pid, pid, child.started)
        assert finish(child) == 0, trainer.log(warm)
    first = trainer.events(warm)[0]
    assert (first["type"], first["phase"]) == ("phase", "loading")
    check_alike(warm, cold)


def test_a_forked_child_is_the_workers_own_and_ends_as_the_cold_one_to_the_bit(
    tiny_dir: Path, tmp_path: Path, environment: dict[str, str], cold: Path
) -> None:
    first, second, third = (write_run(tmp_path / name, tiny_dir, **AXES) for name in ("first", "second", "third"))
    with forking(environment) as server:
        children = [fork(server, folder, environment) for folder in (first, second)]
        assert pid_of(server) not in [child.pid for child in children]
        for child, folder in zip(children, (first, second), strict=True):
            wait_for(lambda folder=folder: processes.running_in(folder), 60, "its command line")
            seen = processes.look(child.pid)
            assert seen is not None and seen.parent == os.getpid()
            assert (seen.session, seen.group, seen.started) == (child.pid, child.pid, child.started)
            of = Path(f"/proc/{child.pid}")
            words = [os.fsencode(part) for part in (sys.executable, "-m", TRAINER, folder)]
            assert (of / "cmdline").read_bytes().rstrip(b"\0").split(b"\0") == words
            assert environ(child.pid) == environment
            assert os.readlink(of / "fd" / "1") == os.readlink(of / "fd" / "2") == str(folder / "log.txt")
        assert [finish(child) for child in children] == [0, 0], trainer.log(first) + trainer.log(second)
        assert "RuntimeWarning" not in trainer.log(first), trainer.log(first)
        assert server.fork(third, TRAINER, environment | {"OMP_NUM_THREADS": "1"}) is None, "another environment"
    check_alike(first, cold)
    check_alike(second, cold)
