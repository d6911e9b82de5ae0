"""`eft` as a fork of one process that has its imports: a command is then a few hundredths of a second of processor
time, not half a second. `program()` is such an `eft`, in a folder for the PATH: it passes descriptors, variables, cwd
and signals on. That it starts by itself is for the tests that start `client.EFT` and for test_client_wheel.

`program("box.doctor", …)` is one whose `eft doctor` is a fork too: these modules are imported as well, and `python -m`
of one goes on in the fork where `eft` would become it, or in a further fork where `eft` would start it. Only for
programs whose imports read no settings.
"""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import importlib
import os
import pkgutil
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from core import HOME
from core.base.forks import Forked, become_module

MESSAGE_BYTES = 1 << 18
PADDING = " " * 4096
"""Room for a command line."""
LATE = ("typer._adapters", "httpcore")
"""What every command imports when it begins."""
PROGRAM = """#!{python} -IS
import _socket, os, signal, sys

line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
line.connect({address!r})
umask = os.umask(0o022)
descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
order = repr((sys.argv[1:], os.getcwd(), umask, dict(os.environ))).encode()
line.sendmsg([order], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)])
pid = int(line.recv(64))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(line.recv(64) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def program(*modules: str) -> str:
    """The path of `eft` for all tests of this process, alone in its folder. `modules`: programs of the application that
    are forks as well, and modules that these would import."""
    folder = Path(tempfile.mkdtemp(prefix="eft-tests-"))
    atexit.register(shutil.rmtree, folder)
    address = str(folder / "eft.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen(64)
        number = listening.fileno()
        command = [sys.executable, "-m", __name__, PADDING, str(number), *modules]
        server = subprocess.Popen(command, cwd=HOME, pass_fds=[number], stdin=subprocess.DEVNULL)
    atexit.register(server.kill)
    found = folder / "eft"
    found.write_text(PROGRAM.format(python=sys.executable, address=address))
    found.chmod(0o755)
    return str(found)


def main() -> None:
    listening, programs = socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]
    import eft
    from eft.cli import tree

    modules = [module.name for module in pkgutil.walk_packages(eft.__path__, "eft.")]
    for module in (*modules, *LATE):
        importlib.import_module(module)
    commands = tree()
    if programs:
        _import(programs)
        _fork_instead(frozenset(programs))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    while True:
        line, _ = listening.accept()
        message, given, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 3)
        if os.fork() == 0:
            listening.close()
            _attend(line, commands, ast.literal_eval(message.decode()), given)
        line.close()
        for descriptor in given:
            os.close(descriptor)


def _import(names: Sequence[str]) -> None:
    from core.train import __main__ as trainer

    with trainer.importing():  # some import torch
        for name in names:
            if hasattr(importlib.import_module(name), "__path__"):
                importlib.import_module(f"{name}.__main__")
        gc.collect()


class _Started(Forked):
    """The part of subprocess.Popen that `eft` needs of a program that it starts."""

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdout = stdout

    def __enter__(self) -> _Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.wait()


def _fork_instead(programs: frozenset[str]) -> None:
    """In the forks of this process, these programs are no starts of Python."""
    execute, start = os.execve, subprocess.Popen

    def known(command: Any) -> bool:
        return list(command[:2]) == [sys.executable, "-m"] and command[2] in programs

    def become(path: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
        if not known(command):
            execute(path, command, environment)
        os.environ.clear()
        os.environ.update(environment)
        become_module(command[2], command[3:])

    def begin(command: Any, **options: Any) -> Any:
        if not known(command):
            return start(command, **options)
        reader, writer = os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            for descriptor, number in ((os.open(os.devnull, os.O_RDONLY), 0), (writer, 1)):
                os.dup2(descriptor, number)
            become(command[0], command, options["env"])
        os.close(writer)
        return _Started(pid, os.fdopen(reader, "rb"))

    os.execve, subprocess.Popen = become, begin  # type: ignore[misc,assignment]


def _attend(line: socket.socket, commands: Any, order: tuple[Any, ...], given: Sequence[int]) -> NoReturn:
    """Run the command in a process of its own, and say how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        line.close()
        _run(commands, *order, given)
    for descriptor in given:
        os.close(descriptor)
    line.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    line.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(
    commands: Any, arguments: list[str], cwd: str, umask: int, environment: dict[str, str], given: Sequence[int]
) -> NoReturn:
    for number, descriptor in enumerate(given):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 -- until the end
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["eft", *arguments]
    code: object = 0
    try:
        commands.main(arguments, "eft")
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    assert isinstance(code, int)
    os._exit(code)


if __name__ == "__main__":
    main()
