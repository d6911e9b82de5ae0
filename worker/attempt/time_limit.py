"""The limit on a job's time on its slots, over all its attempts."""

from __future__ import annotations

import time

from core.jobs.kinds import CHILDREN, Kind
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Failed

RESERVE = 0.1
"""Share of max_runtime_seconds that is kept for the last checkpoint, at most the stop grace."""


class TimeLimit:
    """The limit of a claim whose attempt begins now."""

    def __init__(self, claim: Claim) -> None:
        limited = CHILDREN[claim.kind].limited
        self._seconds: int | None = claim.spec["resources"].get("max_runtime_seconds") if limited else None
        self._kind, self._spent, self._began = claim.kind, claim.spent_seconds, time.monotonic()

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._seconds is not None

    @property
    def used_up(self) -> bool:
        """Whether attempts before this one have left nothing."""
        return self._seconds is not None and self._spent >= self._seconds

    def reached(self, grace: float) -> bool:
        """Whether the child must leave now to be gone in time; it has up to `grace` seconds for its last checkpoint."""
        if self._seconds is None:
            return False
        reserve = min(grace, RESERVE * self._seconds)
        return self._spent + time.monotonic() - self._began >= self._seconds - reserve

    def failure(self) -> Failed:
        """What the job ends with."""
        if self._kind == Kind.EXPORT:
            words = (
                f"the formats were not made within max_runtime_seconds = {self._seconds}, and nothing of them is kept: "
                "ask for them again with more seconds, or for fewer formats at once"
            )
            return Failed("user", "max_runtime", words, "max_runtime_seconds")
        words = (
            f"its resources.max_runtime_seconds = {self._seconds} are used up; `retry` continues from its newest "
            "checkpoint with as many seconds again"
        )
        return Failed("user", "max_runtime", words, "resources.max_runtime_seconds")
