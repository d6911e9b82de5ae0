"""How a child is tied to its worker: asked to stop by SIGTERM, ended by silence on stdin (core/spec/run/heartbeat.py).

The stdin fence is what keeps two trainers from running one job: a worker that is dead, frozen or cut off from the
database stops writing heartbeats, and the child is gone before the lease is. A heartbeat says when the lease was held,
so that one which waited in a pipe, because its reader was stopped, is as old as it is. PR_SET_PDEATHSIG is only the
faster messenger.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from core.base.clock import boottime
from core.base.process import die_with_parent
from core.spec.run import heartbeat
from core.spec.run.exit_codes import EXIT_FENCED
from core.train.base.stop import Stop

OOM_SCORE_ADJ = 500
"""The kernel takes the trainer before the worker, the database and the API (proc_pid_oom_score_adj(5))."""
STDIN = 0


def arm(
    fence_seconds: float | None,
    *,
    held_at: float | None = None,
    on_stop: Callable[[], None] | None = None,
    on_fence: Callable[[], None] = lambda: None,
    on_beat: Callable[[float], None] = lambda held_at: None,
    first_to_go: bool = True,
) -> Stop:
    """Call once, from the main thread, before anything slow is imported.

    `fence_seconds` None means that a person runs this by hand: stdin and the parent are left alone. The fence's clock
    starts at `held_at` (core/spec/run/heartbeat.py), and ends us here and now when that is too long ago. `on_stop` runs
    inside the signal handler, for a child whose work may be dropped anywhere; `on_fence` ends what must not live on
    when the fence ends this process; `on_beat` hears of each heartbeat, in the fence's thread. `first_to_go`: the
    kernel should rather take this process for want of memory than others; not one that only holds its children's
    lifeline. The kernel ties PDEATHSIG to the *thread* that spawned us, so a worker must spawn from a thread that
    lives as long as the child.
    """
    stop = Stop()

    def stop_requested(signum: int, frame: FrameType | None) -> None:
        stop.heard()
        if on_stop is not None:
            on_stop()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # pool workers hand it down ignored
    signal.signal(signal.SIGTERM, stop_requested)
    faulthandler.enable()  # a crash in native code leaves the stacks of all threads in the log
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # and so does a hang, when the worker asks for them
    if first_to_go:
        _volunteer_for_oom_kill()
    else:
        _be_killed_as(os.getppid())
    if fence_seconds is not None:
        parent = os.getppid()
        die_with_parent()
        _raise_fence(fence_seconds, parent, held_at, on_fence, on_beat)
    return stop


def arm_rank(launcher: int | None = None, fence_seconds: float | None = None, held_at: float | None = None) -> Stop:
    """As `arm`, for one of several ranks: when its launcher is gone, so is the rank, and when nothing comes from it,
    since it is stopped or hears nothing itself, the rank counts the silence. `launcher`: the number of that process;
    None: whoever is the parent now."""
    stop = Stop()

    def stop_requested(signum: int, frame: FrameType | None) -> None:
        stop.requested = True

    parent = os.getppid() if launcher is None else launcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to answer
    signal.signal(signal.SIGTERM, stop_requested)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _volunteer_for_oom_kill()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FENCED)
    if fence_seconds is not None:
        _raise_fence(fence_seconds, parent, held_at)
    return stop


def await_order() -> None:
    """For a spare: a SIGTERM ends it, and so does the worker's end; it goes before anything else when memory is short.
    `arm` follows once it has an order."""
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _volunteer_for_oom_kill()
    die_with_parent()
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


def _raise_fence(
    fence_seconds: float,
    parent: int,
    held_at: float | None,
    on_fence: Callable[[], None] = lambda: None,
    on_beat: Callable[[float], None] = lambda held_at: None,
) -> None:
    if os.getppid() != parent:
        os._exit(EXIT_FENCED)
    heart = _Heart(boottime() if held_at is None else held_at, on_fence, on_beat)
    heart.listen(0.0)  # what came while this process was being started
    if (silent := heart.silent()) >= fence_seconds:
        _fence(f"no heartbeat for {silent:.0f} s, since before it was started", on_fence)
    threading.Thread(target=_watch, args=(fence_seconds, parent, heart), name="eft-fence", daemon=True).start()


def _watch(fence_seconds: float, parent: int, heart: _Heart) -> None:
    while True:
        heart.listen(max(0.0, min(1.0, fence_seconds - heart.silent())))
        # This thread may have stood still itself, while a library was loaded or the box had no turn for it: heartbeats
        # that came meanwhile wait in the pipe, and each says how old it is. Only an empty pipe is silence.
        while (silent := heart.silent()) >= fence_seconds:
            if not heart.listen(0.0):
                _fence(f"no heartbeat for {silent:.0f} s", heart.on_fence)
        if os.getppid() != parent:
            _fence("the worker is gone", heart.on_fence)


@dataclass(slots=True)
class _Heart:
    """What has come on stdin."""

    held_at: float
    """When the lease was held, as far as it was told."""
    on_fence: Callable[[], None]
    on_beat: Callable[[float], None]
    _unread: bytes = b""
    """The beginning of a line."""

    def silent(self) -> float:
        """Seconds since the lease was held, as far as it was told."""
        return boottime() - self.held_at

    def listen(self, seconds: float) -> bool:
        """Hear what is there, or wait for it so long; whether anything came. Does not return at end of file."""
        readable, _, _ = select.select([STDIN], [], [], seconds)
        if not readable:
            return False
        if not (part := os.read(STDIN, 65536)):
            _fence("the worker closed the heartbeat", self.on_fence)
        heard = [boottime()] if b"." in part else []  # of a worker that runs since before heartbeats told the time
        *lines, self._unread = (self._unread + part.replace(b".", b"")).split(b"\n")
        if heard := heard + [self._held_at(line) for line in lines]:
            self.held_at = max(self.held_at, *heard)
            self.on_beat(self.held_at)
        return True

    def _held_at(self, line: bytes) -> float:
        try:
            return heartbeat.held_at(line)
        except ValueError:
            _fence(f"this is not a heartbeat: {line[:40]!r}", self.on_fence)


def _fence(why: str, on_fence: Callable[[], None] = lambda: None) -> NoReturn:
    # Not sys.stderr: its lock may be held by the thread we are about to cut off.
    os.write(2, f"fenced: {why}; this attempt has no owner any more\n".encode())
    on_fence()
    os._exit(EXIT_FENCED)


def _volunteer_for_oom_kill() -> None:
    if sys.platform != "linux":
        return
    path = Path("/proc/self/oom_score_adj")
    try:
        if int(path.read_text()) < OOM_SCORE_ADJ:
            path.write_text(str(OOM_SCORE_ADJ))
    except OSError as error:
        print(f"notice: could not raise {path}: {error}", file=sys.stderr, flush=True)


def _be_killed_as(parent: int) -> None:
    """Take back what a fork server has volunteered for, where it forked this process."""
    if sys.platform != "linux":
        return
    mine, theirs = Path("/proc/self/oom_score_adj"), Path(f"/proc/{parent}/oom_score_adj")
    try:
        if (score := theirs.read_text()) != mine.read_text():
            mine.write_text(score)
    except OSError as error:
        print(f"notice: could not set {mine} to its parent's: {error}", file=sys.stderr, flush=True)
