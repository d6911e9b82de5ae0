"""`memory.stream: auto` against what is free: the first that fits, with its reason."""

from __future__ import annotations

import pytest

from core.plan.stream import Free, Need, decide
from core.spec.axes.runtime import AutoStream, DiskStream, HostStream, NoStream

GIB = 2**30
NEED = Need(
    blocks=32 * GIB, largest_block=GIB, outside=2 * GIB, trained=GIB, working=8 * GIB, working_streamed=2 * GIB, of=32
)


@pytest.mark.parametrize(
    "device, host, one_memory, where, slots, reason",
    [
        (48, 100, False, "none", 0, "43.00 GiB of 48.00 GiB free"),
        (47, 100, False, "host", 2, "do not fit in the 47.00 GiB"),
        (8, 40, False, "host", 2, "fit in host memory"),
        (8, 39, False, "disk", 2, "nor the blocks' 32.00 GiB in host memory"),
        (7, 100, False, "host", 1, "do not fit"),
        (40, 40, True, "disk", 2, "which is the host's memory"),
        (None, None, True, "none", 0, "unknown"),
        (8, None, False, "host", 2, "fit in host memory"),
    ],
)
def test_auto(device: int | None, host: int | None, one_memory: bool, where: str, slots: int, reason: str) -> None:
    free = Free(
        device=None if device is None else device * GIB,
        host=None if host is None else host * GIB,
        one_memory=one_memory,
    )
    found = decide(AutoStream(), NEED, free)
    assert (found.where, found.slots) == (where, slots), found
    assert reason in found.reason


def test_what_is_asked_for_is_done() -> None:
    free = Free(device=1, host=1, one_memory=False)
    assert decide(NoStream(), NEED, free).where == "none"
    host = decide(HostStream(slots=3, pinned=False), NEED, free)
    assert (host.where, host.slots, host.pinned) == ("host", 3, False)
    assert decide(DiskStream(), None, free).where == "disk"


def test_what_cannot_be_measured_is_not_streamed() -> None:
    assert decide(AutoStream(), None, Free(device=1, host=1, one_memory=False)).where == "none"
