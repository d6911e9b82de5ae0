"""Programs of the service as forks of a process that has imported what they need: a start is then a tenth of a second
of processor time, not two or three. Each process of pytest has one such process, from its first start on.

A fork has the command line, variables (in /proc too), folder, umask and descriptors of a program that is started, leads
a session of its own, ends as any Python program does, and is a child of the test's process. `box.up` starts its own
fork server in the same way. What differs is when modules were imported; that cold starts work is for the tests that ask
for them (`cold`), and for all that start `eft up` by its name.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from box import fork_server
from core import HOME
from core.base.collector import importing
from core.base.forks import Forked, become_module, fork_orphan
from core.base.process import adopting_orphans, die_with_parent

IMPORTS = (*fork_server.IMPORTS, "box.up", "core.db.migrate")
MODULES = ("api", "api.auth.keys", "box.up", "core.db.migrate", "worker")
"""What may be forked: programs whose imports read no settings."""
PADDING = " " * 2048
"""Room for a command line."""
ROOM = "TESTS_ROOM"
"""A variable that makes room for those of a fork."""
ROOM_BYTES = 1 << 15
MESSAGE_BYTES = 1 << 20


class Program(Forked):
    """The part of subprocess.Popen that tests need."""

    def wait(self, timeout: float | None = None) -> int:  # type: ignore[override]
        if timeout is not None and self.returncode is None:
            exit = os.pidfd_open(self.pid)
            try:
                if not select.select([exit], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            finally:
                os.close(exit)
        return super().wait()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    module: str, *arguments: str, environment: Mapping[str, str], log: int, cwd: Path = HOME, with_parent: bool = False
) -> Program | subprocess.Popen[bytes]:
    """`python -m MODULE ARGUMENTS`, whose stdout and stderr are `log`. `with_parent`: it is killed when this process
    ends; call from the main thread then."""
    order = {
        "command": [module, *arguments],
        "environment": dict(environment),
        "cwd": str(cwd),
        "umask": _umask(),
        "with_parent": with_parent,
    }
    if pid := _forks().fork(order, [log]) if module in MODULES else 0:
        return Program(pid)
    return start_cold(module, *arguments, environment=environment, log=log, cwd=cwd, with_parent=with_parent)


def start_cold(
    module: str, *arguments: str, environment: Mapping[str, str], log: int, cwd: Path = HOME, with_parent: bool = False
) -> subprocess.Popen[bytes]:
    """As `start`, and not a fork."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=_end_with_parent if with_parent else None,
    )


def run(module: str, *arguments: str, environment: Mapping[str, str]) -> str:
    """What such a program printed; an AssertionError with that where it ends badly."""
    reader, writer = os.pipe()
    with os.fdopen(reader, encoding="utf-8", errors="replace") as output:
        try:
            program = start(module, *arguments, environment=environment, log=writer)
        finally:
            os.close(writer)
        said = output.read()
    assert program.wait() == 0, said
    return said


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _end_with_parent() -> None:
    die_with_parent(signal.SIGKILL)


@functools.cache
def _forks() -> _ForkServer:
    return _ForkServer()


class _ForkServer:
    def __init__(self) -> None:
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", str(theirs.fileno()), PADDING],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=HOME,
                env=self._environment | {ROOM: " " * ROOM_BYTES},
                start_new_session=True,
            )
        assert self._orders.recv(64) == fork_server.READY, "the fork server of the tests did not start"

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The number of the new process; 0 where it has to be started cold, for a variable that is read once."""
        changed = {name for name, _ in {*order["environment"].items()} ^ {*self._environment.items()}}
        if any(fork_server.READ_AT_START.fullmatch(name) for name in changed):
            return 0
        with adopting_orphans():
            socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
            answer = self._orders.recv(64)
        assert answer not in (b"", b"0"), "the fork server of the tests cannot fork"
        return int(answer)


# --- the process that forks, and its forks ---------------------------------------------------------------


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    del os.environ[ROOM]
    with importing():
        for name in IMPORTS:
            importlib.import_module(name)
        gc.collect()
    orders.send(fork_server.READY)
    while True:
        message, given, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not message:  # the tests are over
            os._exit(0)
        order = json.loads(message)

        def child(order: dict[str, Any] = order, given: list[int] = given) -> NoReturn:
            orders.close()
            if order["with_parent"]:
                die_with_parent(signal.SIGKILL)
            if order["command"][0] == "box.up":
                _fork_its_server_too()
            _become(order, given[0])

        pid = fork_orphan(child)
        for descriptor in given:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _become(order: Mapping[str, Any], output: int) -> NoReturn:
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number in (1, 2):
        os.dup2(output, number)
    if output > 2:
        os.close(output)
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _show_environment()
    module, *arguments = order["command"]
    become_module(module, arguments)


def _show_environment() -> None:
    """In /proc/PID/environ, which the kernel reads from where the first variables were (proc_pid_stat(5), env_start and
    env_end): nothing refers to them any more, since all variables were set again."""
    stat = Path("/proc/self/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items())
    assert start and len(text) <= end - start, f"no room for these variables: {len(text)} bytes in {end - start}"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _fork_its_server_too() -> None:
    """A child of this process, which is about to be `box.up`, becomes its fork server when that is to be started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        message, given, _, _ = socket.recv_fds(theirs, MESSAGE_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        theirs.close()
        order = json.loads(message)
        output, stream = given
        os.setsid()
        if stream != order["stream"]:
            if output == order["stream"]:
                output = os.dup(output)
            os.dup2(stream, order["stream"])
            os.close(stream)
        _become(order, output)
    theirs.close()
    popen = subprocess.Popen

    def forked(command: Sequence[str], **options: Any) -> Any:
        if list(command[1:3]) != ["-m", fork_server.__name__] or ours.fileno() < 0:
            return popen(command, **options)
        (stream,) = options["pass_fds"]
        order = {"command": command[2:], "environment": options["env"], "cwd": str(options["cwd"]), "umask": _umask()}
        socket.send_fds(ours, [json.dumps(order | {"stream": stream}).encode()], [options["stdout"], stream])
        ours.close()
        return Program(pid)

    fork_server.subprocess = type("subprocess", (), {**vars(subprocess), "Popen": staticmethod(forked)})  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
