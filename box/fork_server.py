"""The process from which `eft up` forks the API and the worker: it imports what both need, once, while the database and
the broker are made ready. A member that ends is there again within a fraction of a second.

A forked member differs from one that is started cold only in what was imported before it began. It has the same
session, folder, descriptors and parent; its variables are set after the imports. The fork server itself is started
with the API's variables, since the memory of every member begins as a copy of its own. Where there is no fork server,
members start cold, and the log of the supervisor says so.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from core import HOME, private
from core.base import forks
from core.base.collector import importing
from core.base.forks import Forked, become_module, fork_orphan
from core.base.process import adopting_orphans, die_with_parent

IMPORTS = (
    *("api.ready", "api.auth.keys"),
    *("worker.agent.agent", "worker.messages", "worker.upkeep.housekeeping", "worker.preflight.joining"),
    *("celery.bin.celery", "celery.apps.worker", "celery.worker.consumer", "celery.concurrency.thread"),
)
"""Modules that read no settings when they are imported. Named here as texts, as the members are in their commands:
box knows neither the API nor the worker."""
ANSWER_SECONDS = 60.0
"""For a fork, which takes milliseconds, on a machine that has no turn for it."""
READY = b"ready"
PADDING = " " * 1024
"""Room in the command line for that of a member."""
MESSAGE_BYTES = 1 << 20
STDOUT, STDERR = 1, 2


class MemberForkServer:
    """The supervisor's side. Use it from one thread, which outlives the members."""

    def __init__(self, environment: Mapping[str, str], log: Path, imports: Sequence[str] = IMPORTS) -> None:
        self._environment = dict(environment)
        self._ready = False
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._process: subprocess.Popen[bytes] | None = forks.launch(
                [sys.executable, "-m", "box.fork_server", str(theirs.fileno()), PADDING, *imports],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=HOME,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(output)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def await_ready(self, stops: Callable[[], bool]) -> None:
        """Wait until it has imported everything, has ended, or `stops()`."""
        self._orders.settimeout(0.1)
        while self._process is not None and not self._ready and not stops():
            try:
                if self._orders.recv(64) == READY:
                    self._ready = True
                else:
                    self._ended()
            except TimeoutError:
                pass
            except OSError:
                self._ended()
        if self._process is not None:
            self._orders.settimeout(ANSWER_SECONDS)

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], output: int, kept: Sequence[int]
    ) -> Forked | None:
        """`python -m module arguments` with this environment; its stdout and stderr are `output`, and it keeps the
        descriptors `kept`. None where it has to be started cold."""
        command = [sys.executable, "-m", module, *arguments]
        fits = sum(len(os.fsencode(word)) + 1 for word in command) <= len(PADDING)
        if not (self._ready and fits and self._takes(environment)):
            return None
        order = json.dumps({"module": module, "arguments": list(arguments), "environment": dict(environment)})
        try:
            with adopting_orphans():
                socket.send_fds(self._orders, [order.encode()], [output, *kept])
                answer = self._orders.recv(64)
        except OSError as error:
            if error.errno != errno.EMSGSIZE:
                self._ended()
            return None
        if not answer:
            self._ended()
        return Forked(int(answer)) if answer not in (b"", b"0") else None

    def stop(self) -> None:
        """End it. Members stay."""
        self._orders.close()
        self._ready = False
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _takes(self, environment: Mapping[str, str]) -> bool:
        return not any(forks.READ_AT_START.fullmatch(name) for name in forks.changed(self._environment, environment))

    def _ended(self) -> None:
        print("the fork server ended; API and worker start cold from now on", file=sys.stderr, flush=True)
        self.stop()


def main() -> None:
    private.umask()  # members inherit it
    parser = argparse.ArgumentParser(prog="python -m box.fork_server", description="Fork the members of `eft up`.")
    parser.add_argument("fd", type=int, help="number of the inherited socket on which the orders come")
    parser.add_argument("padding", help="makes room in the command line for that of a member")
    parser.add_argument("imports", nargs="+", help="modules that are imported before the first order")
    given = parser.parse_args()
    supervisor = os.getppid()
    die_with_parent(signal.SIGKILL)  # it has nothing to tidy up
    with importing():
        for name in given.imports:
            importlib.import_module(name)
        gc.collect()
    orders = socket.socket(fileno=given.fd)
    orders.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 16, socket.MSG_CMSG_CLOEXEC)
        if not message:  # the supervisor is gone
            os._exit(0)
        order = json.loads(message)

        def child(order: dict[str, Any] = order, descriptors: list[int] = descriptors) -> NoReturn:
            orders.close()
            _become(order, descriptors, supervisor)

        pid = fork_orphan(child)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _become(order: dict[str, Any], descriptors: list[int], supervisor: int) -> NoReturn:
    """`python -m MODULE ARGUMENTS`, which ends as any Python program does."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != supervisor:
        os._exit(1)
    output, *kept = descriptors
    for number in (STDOUT, STDERR):
        os.dup2(output, number)
    os.close(output)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)
    os.environ.clear()
    os.environ.update(order["environment"])
    become_module(order["module"], order["arguments"])


if __name__ == "__main__":
    main()
