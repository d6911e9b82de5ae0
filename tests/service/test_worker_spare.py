"""The spare trainer: what it sees, whose child it becomes, how it ends, and that no result depends on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.base import forks
from core.hardware import device_mask
from core.hardware.device_mask import Gpu
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FENCED
from core.spec.run.standby import STANDBY_PADDING
from core.train.entry.fencing import boottime
from tests.support import trainer
from tests.support.service import wait_for
from worker import processes
from worker.attempt.child import Child, spawn
from worker.attempt.standby import StandbyTrainers
from worker.environment import child_environment

DIRTY = {
    **{name: value for name, value in os.environ.items() if forks.READ_AT_START.fullmatch(name)},
    "PATH": os.environ["PATH"],
    "EFT_DATABASE_URL": "postgresql://eft:hunter2@db/eft",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "HF_TOKEN": "hf_hunter2",
    "HIP_VISIBLE_DEVICES": "0,1",
    "CUDA_VISIBLE_DEVICES": "0",
    "PYTHONPATH": "/somewhere",
}
GPU = Gpu(2, "amd", "GPU-1", "0000:03:00.0", "MI300X", "gfx942", 1 << 37)
Keep = Callable[..., AbstractContextManager[StandbyTrainers]]


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Path:
    return tiny_dir


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return child_environment("train", gpu=None, threads=1, root=tmp_path, inherited=DIRTY)


@pytest.fixture
def keep(environment: dict[str, str]) -> Keep:
    @contextmanager
    def keeping(busy: Callable[[], bool] = lambda: False) -> Iterator[StandbyTrainers]:
        """While `busy` says so no other one is started, which would import torch beside what is tested."""
        spares = StandbyTrainers(environment, busy)
        thread = threading.Thread(target=spares.run)
        thread.start()
        try:
            yield spares
        finally:
            spares.stop()
            thread.join(90)
            assert not thread.is_alive()

    return keeping


def run_folder(folder: Path, model: Path, *, fence: float = 30.0, **axes: Any) -> Path:
    rows = trainer.write_rows(folder.parent / f"{folder.name}.jsonl", trainer.pairs(24))
    training = {"max_steps": 3, "per_device_train_batch_size": 2, "max_length": 64} | axes.pop("training", {})
    return trainer.write_run(folder, model, rows, fence_seconds=fence, training=training, **axes)


def idle(spares: StandbyTrainers) -> int:
    wait_for(lambda: spares.ready, 200, "a spare")
    assert spares._spare is not None
    return spares._spare.pid


def environ(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


def finish(child: Child) -> int:
    while not child.exited(1.0):
        child.beat(boottime())
    return child.reap()


def test_it_becomes_the_child_of_a_run_and_the_result_is_the_cold_ones_to_the_bit(
    keep: Keep, model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    axes: dict[str, Any] = {"method": {"type": "lora", "lora_dropout": 0.1}}
    warm, cold = (run_folder(tmp_path / name, model, **axes) for name in ("warm", "cold"))
    enough = threading.Event()
    with keep(enough.is_set) as spares:
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
        assert spares.take(cold, environment) is None, "there is one, and nobody waits for the next"
        wait_for(lambda: processes.running_in(warm), 60, "its command line")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        assert command == [os.fsencode(part) for part in (sys.executable, "-m", "core.train", warm)]
        member = processes.look(pid)
        assert member is not None and (member.session, member.group, member.started) == (pid, pid, child.started)
        assert finish(child) == 0, trainer.log(warm)
    first = trainer.events(warm)[0]
    assert (first["type"], first["phase"]) == ("phase", "loading")
    assert finish(Child(cold, "core.train", environment)) == 0, trainer.log(cold)
    assert trainer.weights(warm) == trainer.weights(cold)
    kinds = [
        [event["type"] for event in trainer.events(folder) if event["type"] != "progress"] for folder in (warm, cold)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.usefixtures("forked")
def test_sigterm_means_checkpoint_and_silence_means_the_end(
    keep: Keep, model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    long = {"training": {"max_steps": 100_000}}
    enough = threading.Event()
    with keep(enough.is_set) as spares:
        for name, ends, fence in (("asked", EXIT_CHECKPOINTED, 60.0), ("silent", EXIT_FENCED, 5.0)):
            folder = run_folder(tmp_path / name, model, fence=fence, **long)
            idle(spares)
            if name == "silent":
                enough.set()
            child = spares.take(folder, environment)
            assert child is not None
            while not trainer.events(folder, "metrics"):
                child.beat(boottime())
                assert not child.exited(0.1), trainer.log(folder)
            if name == "asked":
                child.ask()
            assert child.exited(55), trainer.log(folder)
            assert child.reap() == ends, trainer.log(folder)
    assert list((tmp_path / "asked" / "checkpoints").glob("step-*"))
    assert "fenced: no heartbeat" in trainer.log(tmp_path / "silent")


@pytest.mark.usefixtures("forked")
def test_a_dead_spare_is_not_waited_for_and_a_new_one_comes(
    keep: Keep, tmp_path: Path, environment: dict[str, str]
) -> None:
    with keep() as spares:
        assert spares.take(tmp_path, environment) is None, "not even started"
        pid = idle(spares)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: processes.look(pid) is None or not processes.look(pid).alive, 60, "its end")  # type: ignore[union-attr]
        assert spares.take(tmp_path, environment) is None
        spares._not_before = 0.0  # the back-off is half a minute
        assert idle(spares) != pid
        last = idle(spares)
    assert processes.look(last) is None, "an idle one goes with its keeper"


@pytest.mark.usefixtures("forked")
def test_no_spare_is_started_beside_a_starting_job(keep: Keep) -> None:
    starting = threading.Event()
    starting.set()
    with keep(starting.is_set) as spares:
        time.sleep(1.0)
        assert spares._spare is None
        starting.clear()
        wait_for(lambda: spares._spare, 60, "the spare")


def test_only_the_variable_that_hides_gpus_may_change(environment: dict[str, str]) -> None:
    spares = StandbyTrainers(environment, lambda: False)
    with_gpu = child_environment("train", gpu=GPU, threads=1, root=Path(environment["HOME"]).parent, inherited=DIRTY)
    assert spares._changes(environment) == {}
    assert spares._changes(with_gpu) == {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": "2"}
    assert spares._changes(environment | {"OMP_NUM_THREADS": "2"}) is None


def test_a_gpu_that_a_library_does_not_see_means_a_cold_start_in_the_same_process(
    model: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """No library of this box sees the GPU that the order names: the trainer is executed afresh, with that variable."""
    # Nobody tells it of the lease: its fence is longer than a busy machine takes to import torch twice.
    folder = run_folder(tmp_path / "gpu", model, fence=300.0, resources={"type": "single", "accelerator": "gpu"})
    with spawn("core.train.entry.standby", " " * STANDBY_PADDING, environment, subprocess.PIPE, 2) as spare:
        assert spare.stdin is not None and spare.stdout is not None
        assert spare.stdout.readline() == b"ready\n"
        changes = {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": "7"}
        spare.stdin.write(json.dumps({"run_dir": str(folder), "environment": changes}).encode() + b"\n..")
        assert spare.wait(150) == 1
    assert "starting cold" in trainer.log(folder)
    (error,) = trainer.events(folder, "error")
    assert error["failure"] == "machine" and "GPU" in error["message"]


def test_it_ends_with_its_worker_also_while_it_imports(environment: dict[str, str]) -> None:
    for ready in (False, True):
        with spawn("core.train.entry.standby", " " * STANDBY_PADDING, environment, subprocess.PIPE, 2) as spare:
            assert spare.stdin is not None and spare.stdout is not None
            if ready:
                assert spare.stdout.readline() == b"ready\n"
            spare.stdin.close()
            assert spare.wait(150) == EXIT_FENCED
