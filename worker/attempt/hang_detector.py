"""Signs of life of a child: what it wrote into events.jsonl, and how long it may write nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from core.jobs.kinds import CHILDREN, Kind
from core.settings import Settings


class HangDetector:
    """Every event counts; a trainer writes one at least twice a minute (core/train/base/events.py, `alive`) while it is
    in its own code. Bounds are for what it cannot interrupt: one forward pass, one file, one call into a driver."""

    def __init__(self, kind: Kind, settings: Settings) -> None:
        self._kind = kind
        self._settings = settings
        self.phase = ""
        """The phase it reported last; empty before the first."""
        self._heard = time.monotonic()

    def hear(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            self._heard = time.monotonic()
            if line["type"] == "phase":
                self.phase = line["phase"]

    def hung(self) -> str | None:
        """In words, that it has been silent for too long; None while it has not."""
        bound = CHILDREN[self._kind].silence(self.phase, self._settings)
        silent = time.monotonic() - self._heard
        if bound is None or silent < bound:
            return None
        return f"it hung: no sign of life for {silent:.0f} s while {self.phase or 'starting'}"
