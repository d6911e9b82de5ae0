"""`python -P follow_program.py ORDER`: shows one tracker the curves of an attempt, over the tools of that tracker.

ORDER is a JSON file (worker/attempt/tracking.py writes it). The worker holds stdin: a line there is how the job has
ended, and the end of the file without one is the end of the worker. A tracker that does not answer is tried again
until then, and for GRACE seconds more. Ends with 0 once it has all, else with a sentence on standard error.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast, get_args

from core.tracking.points import Points
from core.tracking.runs import MLflowRun, Status, TensorBoardRun, Told, TrackerRun, TrackioRun, WandBRun

GRACE = 60.0
"""Seconds after the attempt's end in which the rest has to be told."""
POLL_SECONDS = 1.0
MOST_SECONDS = 30.0
"""Between two tries of a tracker that does not answer."""
TRACKER_RUNS: dict[str, Callable[[Told], TrackerRun]] = {
    "tensorboard": TensorBoardRun,
    "mlflow": MLflowRun,
    "wandb": WandBRun,
    "trackio": TrackioRun,
}
T = TypeVar("T")


class Unanswered(Exception):
    """The tracker did not take what it was to be told in time."""


class Worker:
    """What comes on stdin."""

    def __init__(self) -> None:
        self.status: Status | None = None
        """How the attempt has ended, once it has."""

    def wait(self, seconds: float) -> None:
        """Until there is a word, or so many seconds."""
        if self.status is not None:
            time.sleep(min(seconds, POLL_SECONDS))
        elif select.select([0], [], [], seconds)[0]:
            said = os.read(0, 100).decode().strip()
            self.status = cast(Status, said) if said in get_args(Status) else "open"
            signal.alarm(int(GRACE))

    def patiently(self, action: Callable[[], T]) -> T:
        """The action's result; it is tried again while it fails."""
        wait = POLL_SECONDS
        while True:
            try:
                return action()
            except (Unanswered, ImportError):
                raise
            except Exception as error:  # whatever the tracker's library raises
                print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
            until = time.monotonic() + wait
            while (left := until - time.monotonic()) > 0:
                self.wait(left)
            wait = min(2 * wait, MOST_SECONDS)


def main() -> int:
    order: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    signal.signal(signal.SIGALRM, _late)
    worker = Worker()
    told = Told(**(order["told"] | {"folder": Path(order["told"]["folder"])}))
    try:
        shown = worker.patiently(lambda: TRACKER_RUNS[order["tracker"]](told))
        points = Points(Path(order["run_dir"]), worker.patiently(shown.had))
        while True:
            over = worker.status is not None  # what was written before the end of the attempt is read after it
            if new := list(points.read()):
                worker.patiently(lambda: shown.take(new))
            if over:
                break
            worker.wait(POLL_SECONDS)
        assert worker.status is not None
        status = worker.status
        worker.patiently(lambda: shown.close(status))
    except Unanswered:
        print(f"{order['tracker']} did not take the rest within {GRACE:g} s", file=sys.stderr, flush=True)
        return 1
    return 0


def _late(signum: int, frame: FrameType | None) -> None:
    raise Unanswered


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of the library may wait for a server that is away
