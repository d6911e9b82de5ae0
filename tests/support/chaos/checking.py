"""A check of a history: what it looked at, and what did not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

CLOCKS = 0.05
"""Seconds that the clocks of the database, of processes and of the file system may differ on one machine."""


@dataclass(slots=True)
class Check:
    """How often an invariant was looked at, and where it did not hold."""

    looked: int = 0
    violations: list[str] = field(default_factory=list)

    def that(self, holds: object, words: Callable[[], str] | str) -> None:
        self.looked += 1
        if not holds:
            self.violations.append(words if isinstance(words, str) else words())
