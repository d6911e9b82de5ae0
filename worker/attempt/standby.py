"""One idle trainer per node that has imported everything already, so that a claimed job starts within milliseconds.

It differs from a cold child in nothing but what it has done before its order: the same spawn, the same environment.
Which GPU it will see is not known on a box with several; it starts with all of them hidden then, and its order names
the one. Where the box has one slot for training, it starts with that slot's variable and nothing changes later.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from core.base import forks
from core.hardware import device_mask
from core.spec.run.standby import STANDBY_PADDING, STANDBY_READY, StandbyOrder
from worker import processes
from worker.attempt.child import Child, spawn

log = logging.getLogger("eft.worker")

MODULE = "core.train.entry.standby"
LOOK_SECONDS = 0.2
RETRY_SECONDS = 30.0
"""After a spare that ended by itself; doubled with each further one."""
WORKERS_STDERR = 2


class ImportedProcess(ABC):
    """Keeps one process that has imported what a trainer needs, and starts another when it is gone. `run` is the thread
    that spawns: it must outlive what it has spawned, because the kernel tells a child when the *thread* that spawned it
    ends.

    `busy` says that a job is starting: the imports would take its processor time away now.
    """

    what: ClassVar[str]
    """What the log calls it."""

    def __init__(self, environment: Mapping[str, str], busy: Callable[[], bool]) -> None:
        self._environment = dict(environment)
        self._busy = busy
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._spare: subprocess.Popen[bytes] | None = None
        self._told = b""
        self._failures = 0
        self._not_before = 0.0

    def run(self) -> None:
        try:
            while not self._stopped.wait(LOOK_SECONDS):
                with self._lock:
                    self._look()
                    wanted = self._spare is None and time.monotonic() >= self._not_before
                if wanted and self._due():
                    self._spawn()
        finally:
            self._stopped.set()
            self._end()

    def _due(self) -> bool:
        return not self._busy()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def ready(self) -> bool:
        with self._lock:
            self._look()
            return self._is_ready()

    @abstractmethod
    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the process."""

    def _spawn(self) -> None:
        try:
            spare = self._launch()
        except OSError as error:
            self._failed(f"could not be started: {error}")
            return
        assert spare.stdout is not None
        os.set_blocking(spare.stdout.fileno(), False)
        with self._lock:
            self._spare, self._told = spare, b""

    def _look(self) -> None:
        """Hear what the spare says, and notice its end. Holds the lock."""
        spare = self._spare
        if spare is None or (self._is_ready() and spare.poll() is None):
            return
        assert spare.stdout is not None
        self._told += spare.stdout.read() or b""
        if spare.poll() is not None:
            self._spare = None
            code = reap(spare)
            self._failed(f"ended with {code}")
        elif self._is_ready():
            self._failures = 0
            log.info("%s %d is ready", self.what, spare.pid)

    def _is_ready(self) -> bool:
        return self._spare is not None and self._told.endswith(STANDBY_READY)

    def _failed(self, why: str) -> None:
        wait = RETRY_SECONDS * 2 ** min(self._failures, 6)
        self._failures += 1
        self._not_before = time.monotonic() + wait
        log.error("the %s %s; jobs start cold, next try in %.0f s", self.what, why, wait)

    def _end(self) -> None:
        with self._lock:
            spare, self._spare = self._spare, None
            if spare is not None:
                reap(spare)


class StandbyTrainers(ImportedProcess):
    """The process becomes the child of one run. `take` may be called from any thread."""

    what = "spare trainer"

    def take(self, folder: Path, environment: Mapping[str, str]) -> Child | None:
        """The spare as the child of the run in `folder`. None, at once, when there is none that fits and is ready."""
        changes = self._changes(environment)
        if changes is None or len(os.fsencode(folder)) > STANDBY_PADDING:
            log.error("the spare trainer cannot become the child of %s; started cold", folder)
            return None
        order = StandbyOrder(run_dir=str(folder), environment=changes).model_dump_json().encode() + b"\n"
        with self._lock:
            self._look()
            if not self._is_ready():
                return None
            spare, self._spare = self._spare, None
            assert spare is not None and spare.stdin is not None and spare.stdout is not None
            try:
                spare.stdin.write(order)  # shorter than a pipe's room: it goes whole, and does not wait
            except BrokenPipeError:
                reap(spare)
                return None
            spare.stdout.close()
        return Child.adopt(spare)

    def _changes(self, environment: Mapping[str, str]) -> dict[str, str | None] | None:
        names = sorted({*self._environment, *environment})
        changes = {
            name: environment.get(name) for name in names if environment.get(name) != self._environment.get(name)
        }
        return changes if set(changes) <= set(device_mask.ALL) else None

    def _launch(self) -> subprocess.Popen[bytes]:
        padding = " " * STANDBY_PADDING
        return spawn(MODULE, padding, self._environment, subprocess.PIPE, WORKERS_STDERR, start=forks.launch)


def reap(spare: subprocess.Popen[bytes]) -> int:
    """End it, with anything it may have started."""
    if spare.returncode is None:
        processes.kill_session(spare.pid)
    code = spare.wait()
    for stream in (spare.stdin, spare.stdout):
        if stream is not None:
            stream.close()
    return code
