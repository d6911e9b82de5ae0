"""An end to a stranger's program that it cannot put off: a timer of the process, which counts processor time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN_SECONDS = 0.2
"""Where the first exception was caught on its way, another one follows."""


@contextmanager
def deadline(seconds: float, over: Exception) -> Iterator[None]:
    """Raise `over` inside once the process has used `seconds` of processor time, between any two of Python's
    instructions. Signals reach the main thread alone, so it does nothing in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def end(number: int, frame: Any) -> None:
        if armed:
            raise over

    before = signal.signal(signal.SIGPROF, end)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_SECONDS)
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
