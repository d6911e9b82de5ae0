"""One child process: spawned in a session of its own, fed with heartbeats, asked to stop, ended with all it started."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from core import HOME
from core.base.files import sync
from core.spec.base import SpecModel
from core.spec.run.folder import LOG_FILE, ORDER_FILE
from core.spec.run.heartbeat import heartbeat
from worker import processes

log = logging.getLogger("eft.worker")


def write_order(folder: Path, order: SpecModel) -> None:
    """Make the run folder, for this user alone, with the order in it; both survive a power cut."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)
    with (folder / ORDER_FILE).open("x", encoding="utf-8") as file:
        file.write(order.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    sync(folder)
    sync(folder.parent)


def open_log(folder: Path) -> int:
    """A descriptor of the log in a run folder, to append to."""
    return os.open(folder / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def spawn(
    module: str,
    argument: str,
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    stream: socket.socket | None = None,
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> subprocess.Popen[bytes]:
    """`python -m module argument` with exactly this environment, in a session of its own, its stdin held by us. The
    child inherits `stream`, whose number is its second argument. `start` takes the arguments of subprocess.Popen."""
    streams = [] if stream is None else [stream.fileno()]
    return _start(["-m", module, argument, *map(str, streams)], environment, stdout, stderr, streams, start)


def spawn_program(program: Path, argument: str, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    """`python -P program argument`, for a program over libraries of its own; otherwise as `spawn`."""
    return _start(["-P", str(program), argument], environment, output, output)


def _start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    stdout: int,
    stderr: int,
    inherited: Sequence[int] = (),
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> subprocess.Popen[bytes]:
    return start(
        [sys.executable, *arguments],
        pass_fds=inherited,
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        cwd=HOME,
        env=dict(environment),
        start_new_session=True,
        bufsize=0,
    )


class Started(Protocol):
    """A process that this one waits for: what a Child needs of subprocess.Popen."""

    pid: int
    stdin: IO[bytes] | None

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int: ...


class Child:
    """Safe to use from several threads. Until `reap` the kernel keeps the number, so no signal can go astray.

    Spawn it from a thread that outlives it: the child asks the kernel to be told when that thread ends.
    """

    def __init__(
        self, folder: Path, module: str, environment: Mapping[str, str], stream: socket.socket | None = None
    ) -> None:
        descriptor = open_log(folder)
        try:
            self._own(spawn(module, str(folder), environment, descriptor, descriptor, stream))
        finally:
            os.close(descriptor)

    @classmethod
    def adopt(cls, process: Started) -> Child:
        """A process that is some run's child from now on (worker/attempt/standby.py)."""
        child = cls.__new__(cls)
        child._own(process)
        return child

    def _own(self, process: Started) -> None:
        self._process = process
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._reaped = False
        self._exit = os.pidfd_open(self.pid)
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        seen = processes.look(self.pid)
        assert seen is not None
        self.started = seen.started

    def beat(self, held_at: float) -> None:
        """The worker is alive, and held the lease at `held_at` (core/spec/run/heartbeat.py)."""
        with self._lock:
            if self._reaped:
                return
            try:
                if self._stdin.write(heartbeat(held_at)) is None:
                    log.warning("child %d does not read its heartbeat", self.pid)
            except BrokenPipeError:
                pass  # it has ended; its waiter sees that

    def exited(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for its end. It stays unreaped."""
        poll = select.poll()
        poll.register(self._exit, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout) * 1000))

    def ask(self) -> None:
        """SIGTERM: checkpoint and leave. To the child alone, who knows best what to do with its own helpers."""
        with self._lock:
            if not self._reaped:
                os.kill(self.pid, signal.SIGTERM)

    def dump(self) -> None:
        """SIGUSR1: it writes the stacks of its threads to its log (core/train/entry/fencing.py)."""
        with self._lock:
            if not self._reaped:
                os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """SIGKILL to the child and to all it started."""
        with self._lock:
            if not self._reaped:
                os.killpg(self.pid, signal.SIGKILL)
                processes.kill_session(self.pid)

    def reap(self) -> int:
        """End what is left of the session, wait until nothing of it lives; the exit status (-N: signal N)."""
        if self._reaped:
            assert self._process.returncode is not None
            return self._process.returncode
        self.kill()
        while not self.exited(30.0) or not processes.end_session(self.pid, 30.0):
            # Uninterruptible sleep inside a driver: its memory is still held, so its slot is not free either.
            log.error("child %d cannot be killed; its slot stays taken until it is gone", self.pid)
        with self._lock:
            self._reaped = True
            code = self._process.wait()
            self._stdin.close()
            os.close(self._exit)
        return code
