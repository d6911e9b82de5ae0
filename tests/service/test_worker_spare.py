"""The spare trainer: what it hears, how it ends, and which changes it can take. That no result depends on it is for
test_worker_starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from core.hardware.device_mask import Gpu
from core.jobs.kinds import Kind
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_FENCED
from core.spec.run.standby import STANDBY_PADDING
from core.train.entry.fencing import boottime
from tests.support import forks, trainer
from tests.support.service import wait_for
from tests.support.starts import DIRTY, idle, keeping, write_run
from worker import processes
from worker.attempt.child import spawn
from worker.attempt.standby import MODULE, StandbyTrainers
from worker.environment import child_environment

GPU = Gpu(2, "amd", "GPU-1", "0000:03:00.0", "MI300X", "gfx942", 1 << 37)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return child_environment(Kind.TRAIN, gpu=None, threads=1, root=tmp_path, inherited=DIRTY)


@pytest.mark.usefixtures("forked")
def test_sigterm_means_checkpoint_and_silence_means_the_end(
    tiny_dir: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    enough = threading.Event()
    with keeping(environment, enough.is_set) as spares:
        for name, ends, fence in (("asked", EXIT_CHECKPOINTED, 60.0), ("silent", EXIT_FENCED, 5.0)):
            folder = write_run(tmp_path / name, tiny_dir, steps=100_000, fence=fence)
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
def test_a_dead_spare_is_not_waited_for_and_a_new_one_comes(tmp_path: Path, environment: dict[str, str]) -> None:
    with keeping(environment) as spares:
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
def test_no_spare_is_started_beside_a_starting_job(environment: dict[str, str]) -> None:
    starting = threading.Event()
    starting.set()
    with keeping(environment, starting.is_set) as spares:
        time.sleep(1.0)
        assert spares._spare is None
        starting.clear()
        wait_for(lambda: spares._spare, 60, "the spare")


def test_only_the_variable_that_hides_gpus_may_change(environment: dict[str, str]) -> None:
    spares = StandbyTrainers(environment, lambda: False)
    with_gpu = child_environment(Kind.TRAIN, gpu=GPU, threads=1, root=Path(environment["HOME"]).parent, inherited=DIRTY)
    assert spares._changes(environment) == {}
    assert spares._changes(with_gpu) == {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": "2"}
    assert spares._changes(environment | {"OMP_NUM_THREADS": "2"}) is None


def test_a_gpu_that_a_library_does_not_see_means_a_cold_start_in_the_same_process(
    tiny_dir: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """No library of this box sees the GPU that the order names: the trainer is executed afresh, with that variable."""
    # Nobody tells it of the lease: its fence is longer than a busy machine takes to import torch.
    folder = write_run(tmp_path / "gpu", tiny_dir, fence=300.0, resources={"type": "single", "accelerator": "gpu"})
    spare = spawn(MODULE, " " * STANDBY_PADDING, environment, subprocess.PIPE, 2, start=forks.launch)
    assert spare.stdin is not None and spare.stdout is not None
    with spare.stdin, spare.stdout:
        assert spare.stdout.readline() == b"ready\n"
        changes = {"CUDA_VISIBLE_DEVICES": None, "HIP_VISIBLE_DEVICES": "7"}
        spare.stdin.write(json.dumps({"run_dir": str(folder), "environment": changes}).encode() + b"\n..")
        assert spare.wait(150) == 1
    assert "starting cold" in trainer.log(folder)
    (error,) = trainer.events(folder, "error")
    assert error["failure"] == "machine" and "GPU" in error["message"]


def test_it_ends_with_its_worker_also_while_it_imports(environment: dict[str, str]) -> None:
    for ready in (False, True):
        start = forks.launch if ready else subprocess.Popen  # which has everything imported at once
        spare = spawn(MODULE, " " * STANDBY_PADDING, environment, subprocess.PIPE, 2, start=start)
        assert spare.stdin is not None and spare.stdout is not None
        with spare.stdout:
            if ready:
                assert spare.stdout.readline() == b"ready\n"
            spare.stdin.close()
            assert spare.wait(150) == EXIT_FENCED
