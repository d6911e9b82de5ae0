"""Bring a model onto this machine before a GPU is held: `python -m core.train.entry.prepare RUN_DIR`
(core/spec/run).

SIGTERM ends it at once with EXIT_CHECKPOINTED: whatever is complete on the disk stays, and the next try goes on from
there.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

from core.errors import EftError, NoSpace
from core.spec.axes.data import HubDataset
from core.spec.run.events import FailureClass
from core.spec.run.exit_codes import EXIT_CHECKPOINTED, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import DatasetOrder, PrepareOrder
from core.train.base import memory_limit
from core.train.base.disk import tell_failure
from core.train.base.events import EventWriter
from core.train.base.log_lines import LogLines
from core.train.entry.arguments import run_folder
from core.train.entry.fencing import arm, leave
from core.train.export.prepare import prepare_exports
from core.train.hub.download import HubUnreachable
from core.train.hub.model_cache import ModelCache
from core.train.prepare.chains import prepare_chain, prepare_reward_model
from core.train.prepare.models import OnProgress, Prepared, prepare_model, prepare_tokenizer
from core.train.rollout.sandboxed.tasks import prepare_problems
from core.train.tools.install import ToolsMissing, install

PROGRESS_SECONDS = 0.5


def main(arguments: list[str]) -> int:
    run_dir = run_folder("core.train.entry.prepare", "Bring a model, and hub data sets, onto the data root.", arguments)
    order = PrepareOrder.model_validate_json((run_dir / ORDER_FILE).read_bytes())
    arm(order.fence_seconds, held_at=order.held_at, on_stop=lambda: os._exit(EXIT_CHECKPOINTED))
    events = EventWriter(run_dir / EVENTS_FILE, LogLines(sys.stdout))
    try:
        memory_limit.hold(order.memory_limit)
        result = _prepare(order, _Progress(events))
    except Exception as error:
        return tell_failure(error, events, _failure(error))
    events.write("result", result=result, artifacts=[])
    return EXIT_OK


def _prepare(order: PrepareOrder, progress: OnProgress) -> dict[str, Any]:
    """The result's fields: folders and sources of all that the order names."""
    models_dir, roots = Path(order.models_dir), [Path(root) for root in order.model_roots]
    runs_dir = None if order.runs_dir is None else Path(order.runs_dir)
    if order.chain is not None and runs_dir is not None:
        found = prepare_chain(order.chain, models_dir, runs_dir, roots, order.offline, progress, weights=order.weights)
    else:
        prepare = prepare_model if order.weights else prepare_tokenizer
        found = prepare(order.model, models_dir, roots, order.offline, progress)
    _install_tools(order, found, progress)
    scorers = [
        prepare_reward_model(one, models_dir, runs_dir, roots, order.offline, progress) for one in order.reward_models
    ]
    result = {
        "model_dir": str(found.model_dir),
        "source": found.source,
        "parameters": found.parameters,
        "summary": found.summary,
        "datasets": [_dataset(one, order, progress) for one in order.datasets],
    }
    if scorers:
        result["reward_models"] = scorers
    return result | found.more_folders


def _install_tools(order: PrepareOrder, found: Prepared, progress: OnProgress) -> None:
    """Make the environments of exports, rewards and trackers that the job will use."""
    if order.cache_dir is None or not (order.exports or order.tools):
        return
    cache_dir = Path(order.cache_dir)
    progress("installing", 0, None)
    task_folder = Path(order.lm_eval_tasks) if order.lm_eval_tasks else None
    prepare_exports(order.exports, found.model_dir, cache_dir, offline=order.offline, task_folder=task_folder)
    for tools in order.tools:
        place = "stage" if tools in ("math", "tasks", "games") else "tracking"
        install(tools, cache_dir, offline=order.offline, field=place)


def _dataset(one: DatasetOrder, order: PrepareOrder, progress: OnProgress) -> dict[str, Any]:
    """Bring rows here, from a hub or a generator of problems; their entry in the result."""
    cache = ModelCache(Path(order.models_dir))
    if isinstance(one.source, HubDataset):
        from core.train.hub.datasets import prepare_dataset  # numpy, a fifth of the start, which few jobs need

        paths, origin = prepare_dataset(one.source, one.field, cache, order.offline, progress)
    elif order.cache_dir is None:
        raise ToolsMissing("the order names no cache for the library that makes these rows", field=one.field)
    else:
        folder = Path(order.cache_dir)
        paths, origin = prepare_problems(one.source, one.field, cache, folder, offline=order.offline, told=progress)
    return {"field": one.field, "paths": [str(path) for path in paths], "source": origin}


def _failure(error: Exception) -> dict[str, Any]:
    """The fields of the event that tells of an error."""
    failure = failure_class(error)
    code = error.code if isinstance(error, EftError) else failure
    message = error.message if isinstance(error, EftError) else f"{type(error).__name__}: {error}"
    if failure == "memory":
        code, message = "memory_limit", f"out of memory while the model is prepared; {memory_limit.ways()}"
    field = error.field if isinstance(error, EftError) else None
    told: dict[str, Any] = {"failure": failure, "code": code, "message": message, "field": field}
    if isinstance(error, NoSpace) and error.needs_bytes is not None:
        told["needs_bytes"] = error.needs_bytes
    return told


def failure_class(error: Exception) -> FailureClass:
    match error:
        case MemoryError():
            return "memory"
        case OSError() if error.errno == errno.ENOMEM:
            return "memory"
        case RuntimeError() if "allocate memory" in str(error):  # torch's, which is not to be imported for this
            return "memory"
        case HubUnreachable() | NoSpace() | OSError():
            return "machine"
        case EftError():
            return "user"
        case _:
            return "internal"


class _Progress:
    """Phases as they change, bytes at most twice a second."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self._phase = ""
        self._last = 0.0
        self._whole = False

    def __call__(self, phase: str, done: int, total: int | None) -> None:
        if phase != self._phase:
            self._events.write("phase", phase=phase)
            self._phase = phase
            self._last = 0.0
        now = time.monotonic()
        first_whole = done == total and not self._whole
        if phase == "downloading" and (now - self._last >= PROGRESS_SECONDS or first_whole):
            self._events.write("progress", bytes=done, total_bytes=total)
            self._last = now
            self._whole = done == total
        elif phase == "converting" and done:
            self._events.alive()


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
