"""Children that are forked from a process which has imported what they need, so that they start within milliseconds.

Their parent is not that process but the one that adopts orphans (core/base/process.py): they outlive the process that
forked them, and whoever ordered them waits for them.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NoReturn


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


def fork_orphan(child: Callable[[], NoReturn]) -> int:
    """Fork a process that leads a session of its own and calls `child` once it has been adopted. Returns its number,
    or 0 where it cannot be forked. The process between this one and the child ends at once."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        try:
            if (pid := os.fork()) != 0:
                os.write(writer, str(pid).encode())
                os._exit(0)
        except OSError as error:
            print(f"a child cannot be forked: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os.close(reader)
        os.close(writer)
        os.setsid()
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
    """Go on as `python -m MODULE ARGUMENTS` in this process, under that command line; ends as any Python program does,
    by SystemExit or what the module raises. Raises ValueError where there is no room for the command line."""
    rename([sys.executable, "-m", module, *arguments])
    sys.argv = [module, *arguments]
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # runpy's: that is meant here
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def run_module(module: str, arguments: Sequence[str]) -> int:
    """The exit status that `become_module` ends with; 1, with the traceback on standard error, where it raises."""
    try:
        become_module(module, arguments)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
