"""Memory of this process by the kernel's count (proc_pid_status(5)).

Not ru_maxrss: in a process that was started by vfork and exec it begins with what the starting process has in memory.
"""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Bytes now."""
    return _status("VmRSS")


def peak() -> int:
    """The most bytes so far."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Count the peak anew, from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
