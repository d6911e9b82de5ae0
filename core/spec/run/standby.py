"""How a standby trainer becomes the child of a run (core/train/entry/standby.py).

It writes STANDBY_READY to stdout once it has imported everything, then waits for a StandbyOrder on stdin.
"""

from __future__ import annotations

from pydantic import Field

from core.spec.base import SpecModel

STANDBY_READY = b"ready\n"
STANDBY_PADDING = 1024
"""Room in the command line of a standby trainer, bytes: the longest path of a run folder that it takes."""


class StandbyOrder(SpecModel):
    """The line on stdin that makes a standby trainer the child of a run."""

    run_dir: str
    environment: dict[str, str | None] = Field(default_factory=dict)
    """Changes to the environment it was started with (null: remove), limited to the variables that hide GPUs."""
