"""The life of a job: the states and the one table of transitions between them."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    QUEUED = "queued"
    """Waits: for its model, for a slot, or for a retry."""
    PREPARING = "preparing"
    """Its model is brought to this installation; no GPU is held."""
    STARTING = "starting"
    """A slot is held and the trainer is being started."""
    RUNNING = "running"
    """The trainer is at work."""
    PAUSING = "pausing"
    """It was asked to pause; its trainer writes a checkpoint and leaves."""
    PAUSED = "paused"
    """It holds nothing and waits to be resumed."""
    STOPPING = "stopping"
    """It was asked to stop for good; its process may still be there."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.PREPARING, Status.STARTING, Status.PAUSED, Status.CANCELLED}),
    Status.PREPARING: frozenset({Status.QUEUED, Status.PAUSING, Status.STOPPING, Status.FAILED}),
    Status.STARTING: frozenset({Status.RUNNING, Status.QUEUED, Status.PAUSING, Status.STOPPING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.SUCCEEDED, Status.FAILED, Status.QUEUED, Status.PAUSING, Status.STOPPING}),
    # A trainer that ended by itself before it saw the wish to pause has ended: there is nothing left to go on with.
    Status.PAUSING: frozenset({Status.PAUSED, Status.STOPPING, Status.SUCCEEDED, Status.FAILED}),
    Status.PAUSED: frozenset({Status.QUEUED, Status.CANCELLED}),
    Status.STOPPING: frozenset({Status.CANCELLED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}

FINAL = frozenset(status for status, following in TRANSITIONS.items() if not following)
LEASED = frozenset({Status.PREPARING, Status.STARTING, Status.RUNNING, Status.PAUSING, Status.STOPPING})
"""States in which a worker owns the job and a process may exist."""


def check(before: Status, after: Status) -> None:
    """Raises ValueError for a step that the table does not have: a defect of ours, never a user's mistake."""
    if after not in TRANSITIONS[before]:
        raise ValueError(f"no transition from {before} to {after}")
