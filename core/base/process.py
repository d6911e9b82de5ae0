"""What the kernel does to a process, or to those it has started, when a parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel for a signal when the thread that spawned this process ends (prctl(2)); nothing outside Linux."""
    if sys.platform == "linux" and _libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Meanwhile this process becomes the parent of every descendant whose own parent ends (prctl(2)), and has to wait
    for it. Raises OSError outside Linux."""
    _adopt_orphans(True)
    try:
        yield
    finally:
        _adopt_orphans(False)


def _adopt_orphans(adopt: bool) -> None:
    if sys.platform != "linux" or _libc.prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl: {os.strerror(ctypes.get_errno())}")
