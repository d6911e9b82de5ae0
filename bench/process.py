"""Memory of this process: now, at its most, and the most counted anew."""

from __future__ import annotations

from pathlib import Path

from tests.support.status import status_bytes


def resident() -> int:
    """Bytes now."""
    return status_bytes("VmRSS")


def peak() -> int:
    """The most bytes so far."""
    return status_bytes("VmHWM")


def reset_peak() -> None:
    """Count the peak anew, from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
