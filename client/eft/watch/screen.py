"""The terminal: drawn on while we watch, and as it was when we leave, however we leave."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

LEAVING = (signal.SIGTERM, signal.SIGHUP)


class Left(Exception):
    """A signal asks us to go."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Screen:
    """`with Screen(console) as screen:` draws on the terminal's other page, without cursor and without echo of keys.

    A resize, `wake` (from any thread) or a key ends `wait`. Ctrl-Z gives the terminal back and draws anew at `fg`.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._settings: list[Any] | None = None
        self._handlers: dict[int, Any] = {}
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __enter__(self) -> Screen:
        self._handlers = {
            signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda number, frame: self.wake()),
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._suspend),
            **{number: signal.signal(number, _leave) for number in LEAVING},
        }
        try:
            self._take()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def _restore(self) -> None:
        self._give()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _take(self) -> None:
        if self._keys is not None:
            self._settings = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def _give(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._keys is not None and self._settings is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._settings)
            self._settings = None

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        self._give()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops here, until `fg`
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or has gone
            os.write(self._write, b".")

    def draw(self, frame: RenderableType) -> None:
        assert self._live is not None
        # Always the terminal's own size: a COLUMNS that a shell has exported was right when it did.
        self._console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
        self._live.update(frame, refresh=True)

    def wait(self, seconds: float) -> str:
        """The keys that were pressed, "" after `seconds` or a wake."""
        sources = [self._read] + ([self._keys] if self._keys is not None else [])
        ready, _, _ = select.select(sources, [], [], seconds)
        if self._read in ready:
            os.read(self._read, 4096)
        if self._keys is not None and self._keys in ready:
            pressed = os.read(self._keys, 64)
            if not pressed:
                raise Left(signal.SIGHUP)  # the terminal has gone
            return pressed.decode(errors="replace")
        return ""


def _leave(number: int, frame: FrameType | None) -> None:
    raise Left(number)


Draw = Callable[[], RenderableType]


def run(
    screen: Screen, draw: Draw, done: Callable[[], bool], press: Callable[[str], bool], seconds: float = 1.0
) -> bool:
    """Draw until `done` (True), or until `press`, which gets the keys, leaves (False)."""
    while True:
        screen.draw(draw())
        if done():
            return True
        if press(screen.wait(seconds)):
            return False
