"""What the kernel knows of processes (proc_pid_stat(5)): whose session they are in, and whether they are gone.

A child leads its own session. As long as one member lives, the kernel gives the leader's number to nobody else, so a
session can be ended by that number even after its leader has gone; only a leader's start time tells a reused number.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    state: str
    """One letter; Z is a process that has ended and waits to be reaped, X one that is gone."""
    parent: int
    group: int
    session: int
    started: float
    """Seconds after boot."""

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def look(pid: int) -> Process | None:
    """The process with this number, or None."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold anything
    return Process(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]) / _TICKS)


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is `ancestor`, or a child of it, or of one of its children."""
    seen: set[int] = set()
    while pid != ancestor:
        process = look(pid)
        if process is None or process.parent in seen:
            return False
        seen.add(pid)
        pid = process.parent
    return True


def everyone() -> list[Process]:
    found = (look(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def members(leader: int) -> list[Process]:
    """The living processes of the session (and of the group) that `leader` began."""
    return [process for process in everyone() if process.alive and leader in (process.session, process.group)]


def running_in(folder: Path) -> list[Process]:
    """Living processes with `folder` among their arguments: a child that no row knows of."""
    wanted = os.fsencode(folder)
    found = []
    for process in everyone():
        try:
            arguments = (PROC / str(process.pid) / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if process.alive and wanted in arguments:
            found.append(process)
    return found


def kill_session(leader: int) -> None:
    """SIGKILL to every member. The leader must be alive or not yet reaped, or members must have been seen."""
    for process in members(leader):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it was quicker


def end_session(leader: int, timeout: float) -> bool:
    """SIGKILL the session again and again until nothing of it lives. False when something is left at `timeout`."""
    deadline = time.monotonic() + timeout
    while members(leader):
        kill_session(leader)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def oom_kills() -> int | None:
    """How often the kernel has killed for want of memory in this process's cgroup; None where that cannot be read."""
    try:
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":  # cgroup v2
                events = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"
                counts = dict(entry.split() for entry in events.read_text().splitlines())
                return int(counts["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None
    return None
