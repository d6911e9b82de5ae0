"""Activity of one GPU at this moment, in the units that every source is brought to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Live:
    """Activity of one GPU. None: unknown."""

    busy_percent: int | None = None
    """Time in which something ran on it, 0 to 100, over the driver's own window (a second or less)."""
    used_bytes: int | None = None
    """Bytes of its memory in use, by any process."""
    celsius: int | None = None
    """Temperature. AMD: of the hottest spot (junction), or of the edge where the card has no such sensor; NVIDIA: of
    the GPU."""
    watts: int | None = None
    """Power that the card draws; of an APU, that of its whole package."""


NOTHING = Live()
