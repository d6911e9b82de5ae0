"""How a standby trainer becomes the child of a run, or forks one (core/train/entry/standby.py).

It writes STANDBY_READY to stdout once it has imported everything, then waits for a StandbyOrder on stdin, or, where it
forks, for any number of ForkOrders on a socket.
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


class ForkOrder(SpecModel):
    """A message for the fork server. With it come the descriptors of the child: stdin, its log and, for a child that is
    given one, its end of a socket pair. The answer is the child's number, in ASCII."""

    module: str
    """Module that the child runs, `python -m MODULE RUN_DIR [DESCRIPTOR]`."""
    run_dir: str
