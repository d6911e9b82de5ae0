"""How a rank ends with an error."""

from __future__ import annotations

import sys
import time
from typing import Any

from core.spec.run.exit_codes import EXIT_DATA_ROOT_LOST, EXIT_FAILED, EXIT_NO_SPACE
from core.train.base.disk import disk_full, print_traceback, tell_failure
from core.train.base.events import EventWriter
from core.train.ranks.env import RankEnv, leave_word
from core.train.ranks.group import PeerLost

WAIT_SECONDS = 30.0
"""For a rank that lost its peer, until the launcher has seen why."""


def tell_launcher(error: BaseException, rank_env: RankEnv, events: EventWriter, payload: dict[str, Any]) -> int:
    """The traceback into the log, `payload` to the launcher, which tells of the first rank that failed; the exit code.

    A rank that has only lost its peer waits to be ended, so that it is never mistaken for the one that died.
    """
    if rank_env.folder is None:  # under torchrun
        return tell_failure(error, events, payload)
    try:
        print(f"--- rank {rank_env.rank} of {rank_env.world}", file=sys.stderr)
        print(f"{payload['code']}: {payload['message']}", file=sys.stderr)
        print_traceback(error)
        if not rank_env.folder.exists():  # it lies in the run's, and the launcher takes it away after us only
            return EXIT_DATA_ROOT_LOST
        leave_word(rank_env, payload, lost_peer=isinstance(error, PeerLost))
    except OSError as second:
        if not disk_full(second):
            raise
        return EXIT_NO_SPACE
    if isinstance(error, PeerLost):
        time.sleep(WAIT_SECONDS)
    return EXIT_NO_SPACE if disk_full(error) else EXIT_FAILED
