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
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Variables that keep libraries from the network, true for every child but those that may use it."""
NETWORK = frozenset(
    {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}
    | {name for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY") for name in (upper, upper.lower())}
)
"""Variables that the download of a model needs, and a trainer does not."""
FORK_VARIABLES = NETWORK.union(OFFLINE)
"""What a fork may have otherwise than its fork server: nothing reads them for good before a child begins, but
huggingface_hub, which is told."""


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
    environment: dict[str, str | None] = Field(default_factory=dict)
    """Changes to the environment of the fork server (null: remove), of FORK_VARIABLES alone."""
