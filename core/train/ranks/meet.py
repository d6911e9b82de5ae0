"""How ranks begin, and how one ends with an error."""

from __future__ import annotations

import sys
import time
from typing import Any

from core.errors import SpecError
from core.spec.run.exit_codes import EXIT_DATA_ROOT_LOST, EXIT_FAILED, EXIT_NO_SPACE
from core.spec.run.orders import RunOrder
from core.train.base.disk import disk_full, print_traceback, tell_failure
from core.train.base.events import EventWriter
from core.train.model.placement import Placement
from core.train.ranks.env import Seat, leave_word
from core.train.ranks.group import PeerLost, Ranks

ALIKE = ("device", "arch", "precision", "weights_dtype", "attention", "tf32", "threads")
"""Of a placement: where these differ, the ranks would not compute the same sums."""
WAIT_SECONDS = 30.0
"""For a rank that lost its peer, until the launcher has seen why."""


def meet(ranks: Ranks, order: RunOrder, placement: Placement) -> dict[str, Any] | None:
    """For the run record: how many ranks there are and what each computes on; None for a run of one. SpecError when
    they are not as many as the order says, or not alike."""
    if ranks.world != order.world_size:
        raise SpecError(
            f"this run is one of {order.world_size} ranks, and {ranks.world} were started; start it by "
            "`python -m core.train`, or with as many under torchrun",
            field="resources.gpus",
        )
    if ranks.world == 1:
        return None
    found = ranks.gather(placement.as_dict())
    for name in ALIKE:
        if any(one[name] != found[0][name] for one in found):
            values = ", ".join(str(one[name]) for one in found)
            raise SpecError(f"the GPUs of this job differ in {name} ({values})", field="resources.gpus")
    return {
        "world_size": ranks.world,
        "backend": getattr(ranks, "backend", None),
        "devices": [one["device_name"] for one in found],
    }


def tell_launcher(error: BaseException, seat: Seat, events: EventWriter, payload: dict[str, Any]) -> int:
    """The traceback into the log, `payload` to the launcher, which tells of the first rank that failed; the exit code.

    A rank that has only lost its peer waits to be ended, so that it is never mistaken for the one that died.
    """
    if seat.folder is None:  # under torchrun
        return tell_failure(error, events, payload)
    try:
        print(f"--- rank {seat.rank} of {seat.world}", file=sys.stderr)
        print(f"{payload['code']}: {payload['message']}", file=sys.stderr)
        print_traceback(error)
        if not seat.folder.exists():  # it lies in the run's, and the launcher takes it away after us only
            return EXIT_DATA_ROOT_LOST
        leave_word(seat, payload, lost_peer=isinstance(error, PeerLost))
    except OSError as second:
        if not disk_full(second):
            raise
        return EXIT_NO_SPACE
    if isinstance(error, PeerLost):
        time.sleep(WAIT_SECONDS)
    return EXIT_NO_SPACE if disk_full(error) else EXIT_FAILED
