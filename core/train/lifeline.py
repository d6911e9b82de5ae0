"""How a child is tied to its worker: asked to stop by SIGTERM, ended by silence on stdin (core/spec/run.py).

The stdin fence is what keeps two trainers from running one job: a worker that is dead, frozen or cut off from the
database stops writing bytes, and the child is gone before the lease is. PR_SET_PDEATHSIG is only the faster messenger.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from core.spec.run import EXIT_FENCED

PR_SET_PDEATHSIG = 1
OOM_SCORE_ADJ = 500
"""The kernel takes the trainer before the worker, the database and the API (proc_pid_oom_score_adj(5))."""
STDIN = 0


class Stop:
    """`requested` turns true with the first SIGTERM and stays so; look at it between micro-steps."""

    def __init__(self) -> None:
        self.requested = False


def arm(
    fence_seconds: float | None,
    *,
    held_at: float | None = None,
    on_stop: Callable[[], None] | None = None,
    on_fence: Callable[[], None] = lambda: None,
    first_to_go: bool = True,
) -> Stop:
    """Call once, from the main thread, before anything slow is imported.

    `fence_seconds` None means that a person runs this by hand: stdin and the parent are left alone. The fence's clock
    starts at `held_at` (core/spec/run.py), and ends us here and now when that is too long ago. `on_stop` runs
    inside the signal handler, for a child whose work may be dropped anywhere; `on_fence` ends what must not live on
    when the fence ends this process. `first_to_go`: the kernel should rather take this process for want of memory than
    others; not one that only holds its children's lifeline. The kernel ties PDEATHSIG to the
    *thread* that spawned us, so a worker must spawn from a thread that lives as long as the child.
    """
    stop = Stop()

    def stop_requested(signum: int, frame: FrameType | None) -> None:
        stop.requested = True
        if on_stop is not None:
            on_stop()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # pool workers hand it down ignored
    signal.signal(signal.SIGTERM, stop_requested)
    faulthandler.enable()  # a crash in native code leaves the stacks of all threads in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # and so does a hang, when the worker asks for them
    if first_to_go:
        _volunteer_for_oom_kill()
    if fence_seconds is not None:
        parent = os.getppid()
        _die_with_parent()
        if os.getppid() != parent:
            os._exit(EXIT_FENCED)
        last = _clock() if held_at is None else held_at
        if _clock() - last >= fence_seconds:
            _fence(f"no heartbeat for {_clock() - last:.0f} s, since before it was started")
        about = (fence_seconds, parent, last, on_fence)
        threading.Thread(target=_watch, args=about, name="eft-fence", daemon=True).start()
    return stop


def arm_rank(launcher: int | None = None) -> Stop:
    """As `arm`, for one of several ranks: its launcher has the heartbeat, and when that is gone, so is the rank.
    `launcher`: the number of that process; None: whoever is the parent now."""
    stop = Stop()

    def stop_requested(signum: int, frame: FrameType | None) -> None:
        stop.requested = True

    parent = os.getppid() if launcher is None else launcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to answer
    signal.signal(signal.SIGTERM, stop_requested)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _volunteer_for_oom_kill()
    _die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FENCED)
    return stop


def await_order() -> None:
    """For a spare: a SIGTERM ends it, and so does the worker's end; it goes before anything else when memory is short.
    `arm` follows once it has an order."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _volunteer_for_oom_kill()
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(EXIT_FENCED)


def leave(code: int) -> NoReturn:
    """End this process now, all that it had to write being written.

    Python's own way out ends the fence's thread first and then takes libraries apart, for many seconds on a busy box,
    in which nothing would end us although the lease is gone; a driver that crashes there would spoil a good result.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _watch(fence_seconds: float, parent: int, last: float, on_fence: Callable[[], None]) -> None:
    while True:
        silent = _clock() - last
        if silent >= fence_seconds:
            _fence(f"no heartbeat for {silent:.0f} s", on_fence)
        readable, _, _ = select.select([STDIN], [], [], min(1.0, fence_seconds - silent))
        if readable:
            if not os.read(STDIN, 4096):
                _fence("the worker closed the heartbeat", on_fence)
            last = _clock()
        if os.getppid() != parent:
            _fence("the worker is gone", on_fence)


def _fence(why: str, on_fence: Callable[[], None] = lambda: None) -> None:
    # Not sys.stderr: its lock may be held by the thread we are about to cut off.
    os.write(2, f"fenced: {why}; nobody owns this attempt any more\n".encode())
    on_fence()
    os._exit(EXIT_FENCED)


def _clock() -> float:
    """Seconds that go on while the machine sleeps: the lease in the database does not sleep either."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def _die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")


def _volunteer_for_oom_kill() -> None:
    if sys.platform != "linux":
        return
    path = Path("/proc/self/oom_score_adj")
    try:
        if int(path.read_text()) < OOM_SCORE_ADJ:
            path.write_text(str(OOM_SCORE_ADJ))
    except OSError as error:
        print(f"notice: could not raise {path}: {error}", file=sys.stderr, flush=True)
