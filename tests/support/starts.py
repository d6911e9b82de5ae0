"""Children of runs as a worker starts them, without a worker: cold, of a spare trainer, or forked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.base import forks
from core.train.entry.fencing import boottime
from tests.support import trainer
from tests.support.service import wait_for
from worker.attempt.child import Child
from worker.attempt.fork_server import ForkServer
from worker.attempt.standby import ImportedProcess, StandbyTrainers

TRAINER = "core.train"
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
"""Variables of a worker, some of which must not reach a child."""


@contextmanager
def keeping(environment: dict[str, str], busy: Callable[[], bool] = lambda: False) -> Iterator[StandbyTrainers]:
    """While `busy` says so no other spare is started, which would import torch beside what is tested."""
    spares = StandbyTrainers(environment, busy)
    with _running(spares):
        yield spares


@contextmanager
def forking(environment: dict[str, str], *, keep: bool = True) -> Iterator[ForkServer]:
    server = ForkServer(environment, lambda: False, keep=keep)
    with _running(server):
        yield server


@contextmanager
def _running(kept: ImportedProcess) -> Iterator[None]:
    thread = threading.Thread(target=kept.run)
    thread.start()
    try:
        yield
    finally:
        kept.stop()
        thread.join(90)
        assert not thread.is_alive()


def pid_of(kept: ImportedProcess) -> int:
    assert kept._spare is not None
    return kept._spare.pid


def idle(spares: StandbyTrainers) -> int:
    """The number of the spare, once it is ready."""
    wait_for(lambda: spares.ready, 200, "a spare")
    return pid_of(spares)


def fork(server: ForkServer, folder: Path, environment: dict[str, str], module: str = TRAINER) -> Child:
    server.await_ready(lambda seconds: threading.Event().wait(seconds))
    child = server.fork(folder, module, environment)
    assert child is not None
    return child


def write_run(folder: Path, model: Path, *, steps: int = 3, fence: float = 60.0, **axes: Any) -> Path:
    rows = trainer.write_rows(folder.parent / f"{folder.name}.jsonl", trainer.pairs(24))
    training = {"max_steps": steps, "per_device_train_batch_size": 2, "max_length": 64}
    return trainer.write_run(folder, model, rows, fence_seconds=fence, training=training, **axes)


def finish(child: Child) -> int:
    """Its exit status, once it has ended by itself."""
    while not child.exited(1.0):
        child.beat(boottime())
    return child.reap()


def environ(pid: int) -> dict[str, str]:
    """Its variables, as /proc has them."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)
