"""How much memory this box has for everything that runs on it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def box_bytes(proc: Path = Path("/proc"), cgroup: Path = CGROUP) -> int | None:
    """Memory of the machine or of the control groups of this process, whichever is less, bytes; None where neither can
    be read (proc_meminfo(5), MemTotal; Linux' cgroup-v2.rst, memory.max of the group and of those above it)."""
    found = [value for value in (_machine(proc), _groups(proc, cgroup)) if value is not None]
    return min(found, default=None)


def _machine(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass  # not Linux
    return None


def _groups(proc: Path, cgroup: Path) -> int | None:
    try:
        own = (proc / "self" / "cgroup").read_text().rpartition("::/")[2].strip()
    except OSError:
        return None
    limits = []
    folder = cgroup / own
    while folder.is_relative_to(cgroup):
        with suppress(OSError, ValueError):  # "max", or no control groups of version 2
            limits.append(int((folder / "memory.max").read_text()))
        folder = folder.parent
    return min(limits, default=None)
