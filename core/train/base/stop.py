"""The wish that a run stops: noted by a signal's handler, looked at where the run can be left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from core.spec.run.exit_codes import EXIT_CHECKPOINTED


class StopRequested(Exception):
    """SIGTERM was seen at a place where the run can be left."""


class Stop:
    """`requested` turns true with the first SIGTERM and stays so; look at it between micro-steps."""

    _at_once = False

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a SIGTERM end the process here and now, for work of which nothing is to be kept, in libraries that do not
        look at `requested`."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def heard(self) -> None:
        """Note the signal; called by its handler."""
        self.requested = True
        if self._at_once:
            os._exit(EXIT_CHECKPOINTED)
