"""Why a running attempt is asked to write a checkpoint and leave."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never


class StopReason(StrEnum):
    """The first seven stand in `jobs.stop_requested`; the last two are known to the worker alone."""

    PAUSE = "pause"
    CANCEL = "cancel"
    DRAIN = "drain"
    """Its node is drained; it goes on elsewhere."""
    HOLD = "hold"
    """Its slot is held or drained; it goes on elsewhere."""
    MAINTENANCE = "maintenance"
    """Its node's maintenance begins."""
    PREEMPT = "preempt"
    """A job of a higher priority takes its slots (`jobs.preempted` says which)."""
    PARK = "park"
    """It is a session to which no operation has come for a while."""
    LEAVING = "leaving"
    """Its worker ends."""
    MAX_RUNTIME = "max_runtime"
    """Its time limit is used up."""

    def message(self, node: str, slots: Sequence[str] = ()) -> str:
        """The reason as people read it in the job's history."""
        match self:
            case StopReason.PAUSE | StopReason.CANCEL:
                return f"asked to {self.value}"
            case StopReason.DRAIN:
                return f"node {node} is drained"
            case StopReason.HOLD:
                one = "slot" if len(slots) == 1 else "one of the slots"
                return f"{one} {', '.join(slots)} of {node} is held"
            case StopReason.MAINTENANCE:
                return f"the maintenance of {node} begins"
            case StopReason.PREEMPT:
                return "a job of a higher priority needs its slots"
            case StopReason.PARK:
                return "no operation has come for a while"
            case StopReason.LEAVING:
                return f"worker on {node} is leaving"
            case StopReason.MAX_RUNTIME:
                return "its time limit is reached"
            case _ as never:
                assert_never(never)
