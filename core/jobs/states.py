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
    STOPPING = "stopping"
    """It was asked to stop; its process may still be there."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.PREPARING, Status.STARTING, Status.CANCELLED}),
    Status.PREPARING: frozenset({Status.QUEUED, Status.STOPPING, Status.FAILED}),
    Status.STARTING: frozenset({Status.RUNNING, Status.QUEUED, Status.STOPPING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.SUCCEEDED, Status.FAILED, Status.QUEUED, Status.STOPPING}),
    Status.STOPPING: frozenset({Status.CANCELLED}),
    Status.SUCCEEDED: frozenset(),
    Status.FAILED: frozenset(),
    Status.CANCELLED: frozenset(),
}

FINAL = frozenset(status for status, following in TRANSITIONS.items() if not following)
LEASED = frozenset({Status.PREPARING, Status.STARTING, Status.RUNNING, Status.STOPPING})
"""States in which a worker owns the job and a process may exist."""


def check(before: Status, after: Status) -> None:
    """Raises ValueError for a step that the table does not have: a defect of ours, never a user's mistake."""
    if after not in TRANSITIONS[before]:
        raise ValueError(f"no transition from {before} to {after}")
