"""Uploads are checked in processes of their own (core/data/apart.py); this side feeds them and hears what they find."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from api.errors import ServiceUnavailable
from core import HOME
from core.base import forks
from core.data import apart
from core.data.check import FileReport
from core.errors import TooLarge
from core.spec.axes.data import Format

MOST = 64
"""Uploads that one API process checks at the same time; most of them wait for their client."""
_ALLOWED = re.compile(r"PATH|LANG|LC_[A-Z]+|TZ|LD_LIBRARY_PATH|VIRTUAL_ENV|PYTHON[A-Z]*")


class Checkers:
    """The checking processes of one API process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parent: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._count = 0

    def begin(self, declared: Format, columns: Mapping[str, str]) -> RemoteCheck:
        """Raises Unavailable."""
        with self._lock:
            if self._count >= MOST:
                raise ServiceUnavailable(f"{MOST} files are being uploaded here at once; try again in a moment")
            self._count += 1
        try:
            try:
                return RemoteCheck(self._fork(), self._left, declared, columns)
            except (OSError, apart.Ended):  # somebody has ended the one that forks: another one is started
                return RemoteCheck(self._fork(), self._left, declared, columns)
        except BaseException as error:
            self._left()
            if isinstance(error, OSError | apart.Ended):
                raise ServiceUnavailable("the check of files could not be started; try again in a moment") from error
            raise

    def close(self) -> None:
        with self._lock:
            self._end()

    def _left(self) -> None:
        with self._lock:
            self._count -= 1

    def _fork(self) -> socket.socket:
        """The socket of a new process."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._started(), [b"f"], [theirs.fileno()])
        return ours

    def _started(self) -> socket.socket:
        if self._control is not None and not _closed(self._control):
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if _ALLOWED.fullmatch(name)}
        with theirs:
            self._parent = forks.launch(
                [sys.executable, "-m", "core.data.apart", str(theirs.fileno())],
                cwd=HOME,
                env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ours
        return ours

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._parent is not None:
            with suppress(subprocess.TimeoutExpired):
                self._parent.wait(5)
            self._parent.kill()
            self._parent.wait()
        self._control = self._parent = None


def _closed(control: socket.socket) -> bool:
    """Whether the other end is gone. That is so a moment before its process can be waited for."""
    try:
        return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class RemoteCheck:
    """One file. `send` and `answer` in turn, then `finish`; `end` in every case, from whatever thread."""

    def __init__(
        self, process: socket.socket, left: Callable[[], None], declared: Format, columns: Mapping[str, str]
    ) -> None:
        self._process = process
        self._left = left
        self._lock = threading.Lock()
        self._pidfd = -1
        self._ended = False
        try:
            _, descriptors, _, _ = socket.recv_fds(process, 1, 1)
            if not descriptors:
                raise apart.Ended
            self._pidfd = descriptors[0]
            apart.send(process, b"B", json.dumps({"declared": declared, "columns": dict(columns)}).encode())
            apart.receive(process)
        except BaseException:
            process.close()
            raise

    def send(self, data: bytes) -> None:
        """Raises TooLarge."""
        try:
            apart.send(self._process, b"D", data)
        except apart.Ended as error:
            raise _too_much() from error

    def answer(self) -> FileReport | None:
        """To what was sent last: None, or the report once there are more faults than are told. Raises TooLarge."""
        try:
            _, data = apart.receive(self._process)
            return apart.report_of(data)
        except apart.Ended as error:
            raise _too_much() from error

    def finish(self, path: Path) -> FileReport:
        """The report over all of it; the bytes lie at `path` by now. Raises TooLarge."""
        try:
            apart.send(self._process, b"F", json.dumps(str(path)).encode())
        except apart.Ended as error:
            raise _too_much() from error
        report = self.answer()
        assert report is not None
        return report

    def end(self) -> None:
        """Callers that wait for an answer meanwhile get TooLarge."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        with suppress(OSError):
            self._process.shutdown(socket.SHUT_RDWR)
        self._left()


def _too_much() -> TooLarge:
    return TooLarge(
        "the file takes more processor time or memory to check than files of its size do; split it, or write it anew "
        "with shorter rows",
        field="file",
    )
