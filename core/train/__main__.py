"""`python -m core.train RUN_DIR`: one batch run, by a worker or by hand (core/spec/run is the contract)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from core.base import collector, quick_imports
from core.spec.run.exit_codes import EXIT_FAILED
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder
from core.train.base.events import EventWriter
from core.train.base.stop import Stop
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import arm, leave


def main() -> int:
    run_dir = run_folder("core.train", "One batch run, from its order to its artifacts.")
    try:
        order = RunOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    except (OSError, ValueError) as error:
        print(f"{run_dir / ORDER_FILE} is not a run order: {error}", file=sys.stderr)
        if run_dir.is_dir():
            message = f"{ORDER_FILE} cannot be read: {error}"
            EventWriter(run_dir / EVENTS_FILE).write(
                "error", failure="internal", code="bad_order", message=message, field=None
            )
        return EXIT_FAILED
    if order.world_size > 1:
        from core.train.ranks.launch import launch

        return launch(run_dir, order)
    stop = arm(order.fence_seconds, held_at=order.held_at)
    _interrupt_stops(stop)
    with importing():
        from core.train.recipe import run  # slow: torch and transformers

    return run(run_dir, stop)


@contextmanager
def importing() -> Iterator[None]:
    """Around the imports of a process that trains: what they read is set, and what only costs time is left out."""
    before_torch()
    quick_imports.install()
    with collector.importing():
        yield


def before_torch() -> None:
    """What torch and its libraries read once, when they are loaded."""
    # Bitwise resume on a GPU needs deterministic cuBLAS.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # OpenMP threads spin while they wait for each other. On a box with anything else to do long spins starve the very
    # thread they wait for: beside a busy process steps of 0.8 s took 5 to 20 s. Short spins cost nothing.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _interrupt_stops(stop: Stop) -> None:
    """Ctrl-C by hand is SIGTERM; the second one interrupts."""

    def interrupted(signum: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    signal.signal(signal.SIGINT, interrupted)


if __name__ == "__main__":
    leave(main())
