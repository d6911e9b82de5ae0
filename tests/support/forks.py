"""Programs of the service as forks of a process that has imported what they need: a start is then a tenth of a second
of processor time, not two or three. Each process of pytest has two such processes, each from its first start on: one
for programs that start no trainer, and one, a fork of it, that has a trainer's imports too.

A fork has the command line, variables (in /proc too), folder, umask and descriptors of a program that is started, leads
a session of its own, ends as any Python program does, and is a child of the test's process. The fork servers of
`box.up` and of a worker are forks as well, each made ahead by the process that will launch it (`ahead` and
`launch` of core/base/forks.py). What differs is when modules were imported; that cold starts work is for the tests that
ask for them (`cold`), and for all that start `eft up` by its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from box import fork_server
from core import HOME
from core.base import forks, quick_imports
from core.base.collector import importing
from core.base.forks import Forked, become_module, fork_orphan
from core.base.process import adopting_orphans, die_with_parent
from core.spec.run.standby import OFFLINE

IMPORTS = (*fork_server.IMPORTS, "box.up", "core.db.migrate", "psycopg", "sqlalchemy.dialects.postgresql.psycopg")
TRAINER = "core.train.entry.standby"
CHECKER = "core.data.apart"
SERVERS = {"box.up": fork_server.__name__, "worker": TRAINER}
"""Programs that start a process of their own to fork trainers from, or what starts such a one, and its module."""
AHEAD = {**SERVERS, "api": CHECKER}
"""Programs that start a process of their own to fork from, and its module."""
MODULES = ("api.auth.keys", "core.db.migrate", *AHEAD)
"""What may be forked: programs whose imports read no settings."""
ALIKE = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
"""Variables of a trainer that are read once, as all fork servers here have them. Other programs may lack them."""
MALLOPT = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
"""Variables that a fork may have all the same: it tells mallopt(3) what the loader would have told it."""
PADDING = " " * 2048
"""Room for a command line."""
ROOM = "TESTS_ROOM"
"""A variable that makes room for those of a fork."""
ROOM_BYTES = 1 << 15
FREE = 512
"""Descriptors from here on are free to move others to."""
MESSAGE_BYTES = 1 << 20
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
"""Of setns(2), unshare(2) and mount(2)."""


class Program(Forked):
    """The part of subprocess.Popen that tests, and those who start fork servers, need."""

    stdout: Any = None

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
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    log: int,
    cwd: Path = HOME,
    with_parent: bool = False,
    network: str = "",
    mounts: Sequence[tuple[Path, Path]] = (),
    descriptors: int = 0,
) -> Program | subprocess.Popen[bytes]:
    """`python -m MODULE ARGUMENTS`, whose stdout and stderr are `log`. `with_parent`: it is killed when this process
    ends; call from the main thread then. `network`: a namespace that it is in from its start on, as by `ip netns exec`,
    where it sees the folders of `mounts` at other places too. `descriptors`: so many it may have at most."""
    if module in MODULES and fits(environment):
        order = _order([module, *arguments], environment, cwd) | {"with_parent": with_parent}
        order |= {"network": network, "mounts": [(str(folder), str(place)) for folder, place in mounts]}
        order["descriptors"] = descriptors
        with _nothing() as stdin:
            return Program(_forks(module in SERVERS).fork(order, [stdin, log, log]))
    assert not network and not descriptors, f"{module} cannot be forked with these variables"
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


def launch(command: Sequence[str], **options: Any) -> Program | subprocess.Popen[bytes]:
    """For `forks.launch` of core.base, in the test's process: the fork server of trainers is a fork, and so is that of
    checks of uploads once there is something to fork it from, which takes longer to start than it does."""
    forked = command[2] == TRAINER or (command[2] == CHECKER and _forks.cache_info().currsize > 0)
    if command[1] != "-m" or not forked or not fits(options["env"]):
        return subprocess.Popen(command, **options)
    return _launched(lambda order, given: _forks(command[2] == TRAINER).fork(order, given), command, options)


def fits(environment: Mapping[str, str]) -> bool:
    """Whether a fork may have these variables: what is read once is there as the fork servers have read it."""
    once = {name: value for name, value in _read_once(environment).items() if ALIKE.get(name) != value}
    return once == _read_once(_own_environment())


def _read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """Those of which a fork server has had its use; but one that only says where bytecode is left, and MALLOPT."""
    return {
        name: value
        for name, value in environment.items()
        if forks.READ_AT_START.fullmatch(name) and name not in ("PYTHONDONTWRITEBYTECODE", *MALLOPT)
    }


@functools.cache
def _own_environment() -> dict[str, str]:
    """Of the test's process, without what ALIKE has."""
    return {name: value for name, value in os.environ.items() if not name.startswith("EFT_") and name not in ALIKE}


def _order(command: Sequence[str], environment: Mapping[str, str], cwd: Path | str) -> dict[str, Any]:
    """`numbers`: those that further descriptors have in the new process."""
    (umask,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "Umask:" in line)
    return {
        "command": list(command),
        "environment": dict(environment),
        "cwd": str(cwd),
        "umask": int(umask, 8),
        "numbers": [],
        "with_parent": False,
        "network": "",
        "descriptors": 0,
    }


@contextlib.contextmanager
def _nothing() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _end_with_parent() -> None:
    die_with_parent(signal.SIGKILL)


def _launched(
    fork: Callable[[dict[str, Any], list[int]], int], command: Sequence[str], options: Mapping[str, Any]
) -> Program:
    """What subprocess.Popen would start, by `fork(order, [stdin, stdout, stderr, …])`."""
    order = _order(command[2:], options["env"], options["cwd"]) | {"numbers": list(options["pass_fds"])}
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as on_failure:
        stdin, write = None, None
        if options["stdin"] == subprocess.PIPE:
            stdin, write = os.pipe()
            theirs.callback(os.close, stdin)
            on_failure.callback(os.close, write)
        else:
            stdin = theirs.enter_context(_nothing())
        stdout, read = options["stdout"], None
        if stdout == subprocess.PIPE:
            read, stdout = os.pipe()
            theirs.callback(os.close, stdout)
            on_failure.callback(os.close, read)
        elif stdout == subprocess.DEVNULL:
            stdout = theirs.enter_context(_nothing())
        program = Program(fork(order, [stdin, stdout, options.get("stderr", 2), *options["pass_fds"]]))
        on_failure.pop_all()
        program.stdin = None if write is None else os.fdopen(write, "wb", buffering=0)
        program.stdout = None if read is None else os.fdopen(read, "rb", buffering=0)
        return program


@functools.cache
def _forks(of_trainers: bool = False) -> _ForkServer:
    return _ForkServer(of_trainers)


class _ForkServer:
    def __init__(self, of_trainers: bool) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            if of_trainers:
                order = _order([__name__, PADDING, str(number)], _own_environment() | ALIKE, HOME)
                order["environment"] |= dict.fromkeys(OFFLINE, "1")
                with _nothing() as stdin:
                    _forks().fork(order | {"numbers": [number]}, [stdin, 1, 2, number])
            else:
                subprocess.Popen(
                    [sys.executable, "-m", __name__, PADDING, str(number)],
                    pass_fds=[number],
                    stdin=subprocess.DEVNULL,
                    cwd=HOME,
                    env=_own_environment() | ALIKE | {ROOM: " " * ROOM_BYTES},
                    start_new_session=True,
                )
        assert self._orders.recv(64) == fork_server.READY, "the fork server of the tests did not start"

    def fork(self, order: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The number of the new process, which has the descriptors as stdin, stdout, stderr and `numbers`."""
        with self._lock, adopting_orphans():
            socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
            answer = self._orders.recv(64)
        assert answer not in (b"", b"0"), "the fork server of the tests cannot fork"
        return int(answer)


# --- the process that forks, and its forks ---------------------------------------------------------------


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[2]))
    os.environ.pop(ROOM, None)
    _own_environment()
    if os.environ.keys() >= set(OFFLINE):
        _import_trainer()
    else:
        with importing():
            for name in IMPORTS:
                importlib.import_module(name)
            gc.collect()
    forks.ahead = _make_ahead
    orders.send(fork_server.READY)
    while True:
        message, given, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
        if not message:  # the tests are over
            os._exit(0)
        order = json.loads(message)

        def child(order: dict[str, Any] = order, given: list[int] = given) -> NoReturn:
            if order["with_parent"]:
                die_with_parent(signal.SIGKILL)
            _become(order, given)

        pid = fork_orphan(child)
        for descriptor in given:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _import_trainer() -> None:
    from core.train import __main__ as trainer
    from core.train.entry import standby

    with trainer.importing():
        standby.imports()
        gc.collect()


def _become(order: Mapping[str, Any], given: Sequence[int]) -> NoReturn:
    """Go on as what is ordered, with no other descriptors than those given."""
    _close_all_but(*given)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FREE) for descriptor in given]
    for descriptor, number in zip(moved, (0, 1, 2, *order["numbers"]), strict=True):
        os.dup2(descriptor, number)
    _close_all_but(*order["numbers"])
    if order["network"]:
        _enter(order["network"], order["mounts"])
    if order["descriptors"]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (order["descriptors"], order["descriptors"]))
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _show_environment()
    for name in MALLOPT.keys() & os.environ.keys():
        assert ctypes.CDLL(None).mallopt(MALLOPT[name], int(os.environ[name])) == 1, name
    module, *arguments = order["command"]
    if module == TRAINER:
        _move_home()
    else:  # a trainer leaves these out, and its fork server has; a worker over a bucket wants boto3
        for name in quick_imports.UNUSED:
            if name in sys.modules and sys.modules[name] is None:
                del sys.modules[name]
    become_module(module, arguments)


def _enter(network: str, mounts: Sequence[tuple[str, str]]) -> None:
    """What `ip netns exec` does (ip-netns(8)), and mounts that no other process sees."""
    libc = ctypes.CDLL(None, use_errno=True)

    def done(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"{network}, {mounts}: {os.strerror(ctypes.get_errno())}")

    with open(f"/run/netns/{network}", "rb") as namespace:
        done(libc.setns(namespace.fileno(), CLONE_NEWNET))
    done(libc.unshare(CLONE_NEWNS))
    done(libc.mount(b"", b"/", None, ctypes.c_ulong(MS_REC | MS_SLAVE), None))
    done(libc.mount(b"sysfs", b"/sys", b"sysfs", ctypes.c_ulong(0), None))
    for folder, place in mounts:
        done(libc.mount(os.fsencode(folder), os.fsencode(place), None, ctypes.c_ulong(MS_BIND), None))


def _close_all_but(*kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def _show_environment() -> None:
    """In /proc/PID/environ, which the kernel reads from where the first variables were (proc_pid_stat(5), env_start and
    env_end): nothing refers to them any more, since all variables were set again."""
    stat = Path("/proc/self/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items())
    assert start and len(text) <= end - start, f"no room for these variables: {len(text)} bytes in {end - start}"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _move_home() -> None:
    """To HF_HOME, below which libraries of the hub have named their folders when they were imported."""
    from huggingface_hub import constants

    before, now = constants.HF_HOME, os.environ["HF_HOME"]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("huggingface_hub", "transformers"):
            for key, value in list(vars(module).items()):
                if isinstance(value, str) and (value == before or value.startswith(f"{before}/")):
                    setattr(module, key, now + value.removeprefix(before))


def _make_ahead(module: str) -> None:
    """A child of this process, which is about to be one of AHEAD, becomes its fork server when that is launched."""
    if module not in AHEAD:
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _close_all_but(theirs.fileno())
        if AHEAD[module] == CHECKER:  # which has none of the API's variables, also while it waits
            os.environ.clear()
            _show_environment()
        message, given, _, _ = socket.recv_fds(theirs, MESSAGE_BYTES, 8, socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        os.setsid()
        _become(json.loads(message), given)
    theirs.close()

    def fork(order: dict[str, Any], given: list[int]) -> int:
        socket.send_fds(ours, [json.dumps(order).encode()], given)
        ours.close()
        return pid

    def launch(command: Sequence[str], **options: Any) -> Program | subprocess.Popen[bytes]:
        if list(command[1:3]) != ["-m", AHEAD[module]] or ours.fileno() < 0 or not fits(options["env"]):
            return subprocess.Popen(command, **options)
        return _launched(fork, command, options)

    forks.launch = launch


if __name__ == "__main__":
    main()
