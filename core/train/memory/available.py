"""Host memory that this process may still take."""

from __future__ import annotations

import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
LIMITS = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))


def available_bytes() -> int | None:
    """Bytes that are free in the machine, in the control groups of this process, or within its own limits, whichever is
    least; None where none can be read (proc_meminfo(5), MemAvailable; Linux' cgroup-v2.rst, memory.max and
    memory.current; setrlimit(2), RLIMIT_DATA and RLIMIT_AS)."""
    found = [value for value in (_machine(), *_groups(), *_limits()) if value is not None]
    return min(found, default=None)


def _machine() -> int | None:
    return _kib(Path("/proc/meminfo"), "MemAvailable")


def _groups() -> list[int]:
    """Each group that this process is in: a limit holds for all below it."""
    try:
        path = Path("/proc/self/cgroup").read_text().rpartition("::/")[2].strip()
    except OSError:
        return []  # not Linux
    folder = CGROUP / path
    found = [_group(each) for each in (folder, *folder.parents) if each.is_relative_to(CGROUP)]
    return [value for value in found if value is not None]


def _group(folder: Path) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no control groups of version 2, or none with a limit on memory
    return None if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))


def _limits() -> list[int]:
    found = []
    for limit, of in LIMITS:
        soft, _ = resource.getrlimit(limit)
        used = None if soft == resource.RLIM_INFINITY else _kib(Path("/proc/self/status"), of)
        if used is not None:
            found.append(max(0, soft - used))
    return found


def _kib(file: Path, name: str) -> int | None:
    """A line `name:   123 kB`, in bytes."""
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return None
