"""Memory of a process by the kernel's count: proc_pid_status(5).

A peak is VmHWM and not ru_maxrss, which in a process that was started by vfork and exec begins with what the starting
process has in memory.
"""

from __future__ import annotations

from pathlib import Path


def status_bytes(name: str, process: int | str = "self") -> int:
    """A line such as VmRSS, VmHWM, VmData, VmLck or RssAnon, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
