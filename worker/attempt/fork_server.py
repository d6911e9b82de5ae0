"""A process per box without GPUs that has imported what its children need, and forks each of them within milliseconds.

A forked child differs from a cold one in nothing but what was imported before it began: it has the same environment,
folder, descriptors, session and parent. Its parent is the worker, which adopts it from the process between, so that a
child outlives the fork server, and its number stays taken until the worker has reaped it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from core.base import forks
from core.base.forks import Forked
from core.base.process import adopting_orphans
from core.spec.run.standby import FORK_VARIABLES, STANDBY_PADDING, ForkOrder
from worker.attempt.child import Child, open_log, spawn
from worker.attempt.standby import MODULE, WORKERS_STDERR, ImportedProcess, reap

log = logging.getLogger("eft.worker")

ANSWER_SECONDS = 60.0
"""For a fork, which takes milliseconds, on a machine that has no turn for it."""
IDLE_SECONDS = 120.0
"""Time without a child after which a fork server ends that is not to be kept."""


class ForkServer(ImportedProcess):
    """The process forks the children of runs. With `keep` it is there ahead of the first job, and stays; without, it
    comes with the first child, and ends once it has had nothing to fork for IDLE_SECONDS.

    `fork` and `await_ready` may be called from any thread.
    """

    what = "fork server"

    def __init__(self, environment: Mapping[str, str], busy: Callable[[], bool], *, keep: bool = True) -> None:
        super().__init__(environment, busy)
        self._keep = keep
        self._orders: socket.socket | None = None
        self._wanted_at = float("-inf")

    def await_ready(self, gives_up: Callable[[float], bool], at_most: float = math.inf) -> None:
        """Wait while it imports, as a cold child would have to, or is about to; until `gives_up(seconds)`, or for so
        many seconds."""
        self._wanted_at = time.monotonic()
        until = self._wanted_at + at_most
        while not self.ready and self._may_come() and time.monotonic() < until and not gives_up(0.05):
            pass

    def fork(
        self, folder: Path, module: str, environment: Mapping[str, str], stream: socket.socket | None = None
    ) -> Child | None:
        """As Child, at once; None where it has to be started cold. Raises OSError when it is not known whether there
        is a child now: it will end, since its stdin is closed."""
        self._wanted_at = time.monotonic()
        changes = forks.changed(self._environment, environment)
        if not FORK_VARIABLES.issuperset(changes) or len(os.fsencode(folder)) > STANDBY_PADDING:
            log.info("the fork server cannot fork the child of %s; started cold", folder)
            return None
        with self._lock:
            self._look()
            if not self._is_ready() or self._orders is None:
                return None
            with adopting_orphans():
                order = ForkOrder(module=module, run_dir=str(folder), environment=changes)
                forked = self._forked(self._orders, folder, order, stream)
        return None if forked is None else Child.adopt(forked)

    def _forked(
        self, orders: socket.socket, folder: Path, order: ForkOrder, stream: socket.socket | None
    ) -> Forked | None:
        reader, writer = os.pipe()
        stdin = os.fdopen(writer, "wb", buffering=0)
        given = [reader, open_log(folder)]
        try:
            message = order.model_dump_json().encode()
            try:
                socket.send_fds(orders, [message], [*given, *([] if stream is None else [stream.fileno()])])
            except BrokenPipeError:  # it has ended a moment ago
                stdin.close()
                return None
            pid = int(orders.recv(64) or b"0")
            if pid == 0:
                raise OSError("the fork server could not fork")
            return Forked(pid, stdin)
        except BaseException:
            stdin.close()
            raise
        finally:
            for descriptor in given:
                os.close(descriptor)

    def _launch(self) -> subprocess.Popen[bytes]:
        if self._orders is not None:
            self._orders.close()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(ANSWER_SECONDS)
        with theirs:
            pipe, padding = subprocess.PIPE, " " * STANDBY_PADDING
            return spawn(MODULE, padding, self._environment, pipe, WORKERS_STDERR, theirs, start=forks.launch)

    def _due(self) -> bool:
        return self._in_use() or (self._keep and not self._busy())

    def _look(self) -> None:
        super()._look()
        if self._spare is not None and not self._keep and not self._in_use():
            spare, self._spare = self._spare, None
            reap(spare)

    def _in_use(self) -> bool:
        return time.monotonic() - self._wanted_at < IDLE_SECONDS

    def _may_come(self) -> bool:
        with self._lock:
            return not self._stopped.is_set() and time.monotonic() >= self._not_before

    def _end(self) -> None:
        super()._end()
        if self._orders is not None:
            self._orders.close()
