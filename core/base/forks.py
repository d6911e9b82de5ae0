"""Children that are forked from a process which has imported what they need, so that they start within milliseconds.

Their parent is not that process but the one that adopts orphans (core/base/process.py): they outlive the process that
forked them, and whoever ordered them waits for them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

READ_AT_START = re.compile(r"(LD|GLIBC|MALLOC|PYTHON|OMP|OPENBLAS|MKL)_?[A-Z0-9_]*|TZ|LANG|LC_[A-Z]+")
"""Variables that the loader, C, Python and libraries of numbers read once: a process that is to have another value
starts cold."""

launch: Callable[..., Any] = subprocess.Popen
"""Starts a process that imports for long, such as a fork server, with the arguments of subprocess.Popen. Tests put a
fork with its imports in the place of a start."""
ahead: Callable[[str], None] | None = None
"""Called with the name of a module before this process goes on as it, while it has one thread. Tests fork here what
`launch` will want."""


class Forked:
    """A forked child of this process, or one that the kernel has made this process the parent of: the part of
    subprocess.Popen that its users need."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None) -> None:
        self.pid = pid
        self.stdin = stdin
        """Our end of the pipe that is its stdin."""
        self.returncode: int | None = None
        """Exit status (-N: signal N); None until `wait` or `poll` has seen the end."""

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        code = self._look(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def changed(environment: Mapping[str, str], to: Mapping[str, str]) -> dict[str, str | None]:
    """Variables of `environment` that differ in `to`, as they are there (None: absent)."""
    return {name: to.get(name) for name, _ in {*environment.items()} ^ {*to.items()}}


def fork_orphan(child: Callable[[], NoReturn]) -> int:
    """Fork a process that leads a session of its own and calls `child` once it has been adopted. Returns its number,
    or 0 where it cannot be forked. The process between this one and the child ends at once."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            if os.fork() != 0:
                os._exit(0)
            os.setsid()
            os.write(writer, str(os.getpid()).encode())  # only now: whoever signals its group is to find it
        except OSError as error:
            print(f"a child cannot be forked: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os.close(reader)
        os.close(writer)
        while os.getppid() == between:
            time.sleep(0.001)
        child()
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        pid = int(told.read() or b"0")
    os.waitpid(between, 0)
    return pid


def rename(arguments: list[str]) -> None:
    """Make this the command line of the process, for `ps` and for whoever looks for it in /proc.

    The kernel reads a command line from the memory of the process (proc_pid_stat(5), arg_start and arg_end). Raises
    ValueError where the one it was started with has less room.
    """
    stat = Path("/proc/self/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    if not start or len(text) > end - start:
        raise ValueError(f"no room for this command line: {len(text)} bytes in {end - start}")
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def become_module(module: str, arguments: Sequence[str]) -> NoReturn:
    """Go on as `python -m MODULE ARGUMENTS` in this process, under that command line, and end as Python ends a program:
    its threads have ended, what it registered with atexit was called, its output is written. Modules are not taken
    apart, which would copy most of the memory that is shared with other forks. Raises ValueError where there is no room
    for the command line."""
    if ahead is not None:
        ahead(module)
    rename([sys.executable, "-m", module, *arguments])
    interrupted = False
    try:
        code = _status(module, arguments)
    except KeyboardInterrupt:
        traceback.print_exc()
        code, interrupted = 1, True
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if not stream.closed:
                stream.flush()
        except OSError:  # nobody reads it any more
            code = code or 120
    if interrupted:  # whoever waits for it sees that Ctrl-C ended it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def run_module(module: str, arguments: Sequence[str]) -> int:
    """The exit status of `python -m MODULE ARGUMENTS` in this process, under that command line; 1, with the traceback
    on standard error, where it raises."""
    try:
        rename([sys.executable, "-m", module, *arguments])
        return _status(module, arguments)
    except BaseException:
        traceback.print_exc()
        return 1


def _status(module: str, arguments: Sequence[str]) -> int:
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # runpy's: that is meant here
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0
