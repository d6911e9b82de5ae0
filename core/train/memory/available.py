"""How much memory this process may still take, before the kernel takes it."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Of the machine, or of the control group this process is in, whichever is less; None where neither can be read
    (proc_meminfo(5), MemAvailable; Linux' cgroup-v2.rst, memory.max and memory.current)."""
    found = [value for value in (_machine(), _group()) if value is not None]
    return min(found, default=None)


def _machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return None


def _group() -> int | None:
    try:
        path = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
        folder = CGROUP / path
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no control groups of version 2, or none with a limit on memory
    return None if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))
