"""A program on a pseudo terminal of its own: what it draws, the keys it gets, and how it leaves the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.service import wait_for

HOME = "\x1b[H"
"""Before each frame of a program that draws the whole screen."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def _lead() -> None:
    """In the child: a session of its own, whose terminal is the one on stdin."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`columns` × `lines`; the program leads the session whose terminal it is."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80, lines: int = 24
    ) -> None:
        self._near, far = pty.openpty()
        self.resize(columns, lines, tell=False)
        self.settings_before: list[Any] = termios.tcgetattr(far)
        self.process = subprocess.Popen(
            command, env={"TERM": "xterm-256color", **environment}, stdin=far, stdout=far, stderr=far,
            preexec_fn=_lead,
        )  # fmt: skip
        self._far = far  # kept open: its settings are looked at when the program has gone
        self._seen = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end
            while chunk := os.read(self._near, 65536):
                self._seen += chunk

    @property
    def raw(self) -> str:
        return self._seen.decode(errors="replace")

    @property
    def text(self) -> str:
        """All that was ever written, without colours and movements."""
        return _CONTROL.sub("", self.raw)

    def frames(self, since: int = 0) -> list[list[str]]:
        """Whole frames, as lines without colours; the last one, which may be half, is left out."""
        parts = self.raw[since:].split(HOME)
        return [_CONTROL.sub("", part).replace("\r", "").split("\n") for part in parts[1:-1]]

    def see(self, words: str, since: int = 0, timeout: float = 120) -> list[str]:
        """The first frame after byte `since` with these words in it."""

        def look() -> list[str] | None:
            return next((frame for frame in self.frames(since) if words in "\n".join(frame)), None)

        return wait_for(look, timeout, f"{words!r} on the screen", self.shown)

    def shown(self) -> str:
        """The last whole frame without its blank lines, and how the program ended if it did: for a test's failure."""
        lines = [line.rstrip() for line in (self.frames() or [self.text[-3000:].split("\n")])[-1]]
        return "\n".join([*(line for line in lines if line), f"exit status {self.process.poll()}"])

    def press(self, keys: str) -> None:
        os.write(self._near, keys.encode())

    def resize(self, columns: int, lines: int, *, tell: bool = True) -> None:
        fcntl.ioctl(self._near, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def end(self, timeout: float = 120) -> int:
        """Its exit status, when it has ended by itself; asserts that the terminal is as it was before."""
        code = self.process.wait(timeout)
        wait_for(lambda: "\x1b[?1049l" in self.raw, timeout, "the program to leave the other page", lambda: self.text)
        assert termios.tcgetattr(self._far) == self.settings_before
        for off, on in (("\x1b[?1049l", "\x1b[?1049h"), ("\x1b[?25h", "\x1b[?25l")):
            assert self.raw.rfind(off) > self.raw.rfind(on), f"{off!r} did not follow {on!r}"
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._far)
        self._reader.join(60)
        os.close(self._near)
