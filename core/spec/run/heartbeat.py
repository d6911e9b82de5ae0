"""Heartbeats on the stdin of a child: the time at which its worker last held the lease.

A heartbeat that waited in the pipe, because its reader was stopped, is as old as the time that it names.
"""


def heartbeat(held_at: float) -> bytes:
    """The line for a lease held at `held_at`, in seconds of this node's CLOCK_BOOTTIME."""
    return b"%d\n" % int(held_at * 1000)


def held_at(line: bytes) -> float:
    """The time that a line made by `heartbeat` names. ValueError for other lines."""
    return int(line) / 1000
