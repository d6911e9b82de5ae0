"""A trainer that runs out of memory by construction: no figure of it is guessed, and no moment has to be met."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from pathlib import Path

MMAPS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""For its environment: every tensor of any size is mapped by itself, and given back to the kernel with its last
reference (mallopt(3)), so that each step maps anew what it needs."""
ROOM = 32 << 20
"""For whatever else a trainer does. A step has to need more: 64 rows of 256 tokens of the tiny model need 100 MiB."""


def squeeze(pid: int, room: int = ROOM) -> None:
    """Until it has ended it may never map more than `room` beyond the least that it was seen with: one of its next
    steps finds no room, however slow anybody is. Begin when it trains, with steps enough to come."""
    least = sys.maxsize
    while (mapped := address_space(pid)) is not None:
        if mapped + room < least:
            least = mapped + room
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_AS, (least, least))
        time.sleep(0.001)


def address_space(pid: int) -> int | None:
    """Bytes that a process has mapped; None where it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return pages * resource.getpagesize() or None
