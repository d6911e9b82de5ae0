"""The clock by which leases and heartbeats are told on one machine."""

from __future__ import annotations

import sys
import time


def boottime() -> float:
    """Seconds that go on while the machine sleeps: the lease in the database does not sleep either."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()
