"""Each hostile folder through preparing, planning and training, in a process of its own with bounds on time and memory:
`python -m tests.support.hostile.runs FOLDER TINY PART OF`. Prints a JSON object a line: what became of a case.

All are forked from this process, which has taken the tiny model itself through, so that a case costs no import. It
computes with one thread (OMP_NUM_THREADS): what is forked beside others would wait for them for ever.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core.errors import EftError
from core.jobs.admission import auto_method, fit
from core.jobs.lifecycle.finish import Failed
from core.plan.models.shape import Shape
from core.spec.axes.model import LocalModel
from core.spec.job import JobSpec
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.exit_codes import EXIT_FAILED, EXIT_OK
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import DataOrder, MemoryLimit, PrepareOrder, RunOrder
from tests.support.hostile.cases import Case, chosen
from tests.support.status import status_bytes
from tests.support.trainer import chats, events, write_rows
from worker.attempt import outcome
from worker.attempt.attempt import LAST_WORDS
from worker.orders import with_shape

CPU_SECONDS = 20
WALL_SECONDS = 90
"""Seconds, generous for a machine with other things to do."""
MEMORY = MemoryLimit(bytes=1 << 30, setting="EFT_TEST_BYTES")


NOWHERE = Path("/nowhere/in/particular")
ORDER: RunOrder


@dataclass
class Told:
    """What became of a case."""

    name: str
    stage: str = "prepare"
    """The last one that it came to."""
    failure: dict[str, Any] | None = None
    """As the error event told it; None: it worked."""
    escaped: str | None = None
    """What no net caught, or how its process ended."""
    seconds: float = 0.0
    peak: int = 0
    notes: list[str] = field(default_factory=list)


def take(case: Case, tiny: Path, work: Path) -> None:
    """In the process that is the case's own: leaves `told.json`."""
    told, model, began = Told(case.name), work / "model", time.process_time()
    try:
        work.mkdir(parents=True, exist_ok=True)
        case.build(tiny, model)
        _through(told, model, work)
    except BaseException:
        told.escaped = traceback.format_exc()
    told.seconds = time.process_time() - began
    told.peak = status_bytes("VmHWM")
    (work / "told.json").write_text(json.dumps(asdict(told)))


def order(model: Path, work: Path) -> RunOrder:
    """A training of one step."""
    spec = {
        "model": str(model),
        "data": str(work / "rows.jsonl"),
        "method": {"type": "lora", "r": 2},
        "training": {"max_steps": 1, "per_device_train_batch_size": 2, "max_length": 64},
    }
    return RunOrder(
        job_id="job-test", attempt=1, spec=resolve(parse_job(spec)), model_dir=str(model),
        train=DataOrder.of(work / "rows.jsonl"), memory_limit=MEMORY,
    )  # fmt: skip


def _through(told: Told, model: Path, work: Path) -> None:
    from core.train import recipe
    from core.train.entry import prepare

    write_rows(work / "rows.jsonl", chats(2))
    asked = PrepareOrder(
        job_id="job-test", attempt=1, model=LocalModel(path=str(model)), models_dir=str(work / "models"),
        model_roots=[str(work)], offline=True, memory_limit=MEMORY,
    )  # fmt: skip
    (work / "prepare").mkdir()
    (work / "prepare" / ORDER_FILE).write_text(asked.model_dump_json())
    prepared = _child(told, work / "prepare", lambda folder: prepare.main([str(folder)]))
    told.stage = "plan"
    spec = ORDER.spec
    for weights in (True, False):
        found = with_shape({"model_dir": str(model)}, weights=weights)
        json.dumps(found, allow_nan=False)
        if "shape" in found:
            _plan(spec, found["shape"])
    if prepared:
        told.stage = "train"
        (work / "train").mkdir()
        text = ORDER.model_dump_json().replace(str(NOWHERE), str(work))
        (work / "train" / ORDER_FILE).write_text(text)
        _child(told, work / "train", recipe.run)


def _plan(spec: JobSpec, about: dict[str, Any]) -> None:
    """As a claim and the end of a preparation do it."""
    shape = Shape.from_dict(json.loads(json.dumps(about)))
    try:
        fit.sought(spec, shape, 64, [fit.GPU, fit.CPU])
        auto_method.settle(spec, shape, 64, fit.CPU)
    except EftError:
        pass  # told as the job's failure, in words


def _child(told: Told, folder: Path, main: Callable[[Path], int]) -> bool:
    code = main(folder)
    if code == EXIT_OK:
        return True
    last = events(folder)[-1] if (folder / EVENTS_FILE).exists() else {}
    if code == EXIT_FAILED and last.get("type") == "error":
        told.failure = {name: last[name] for name in ("failure", "code", "message", "field")}
    else:
        told.escaped = f"exit status {code}, {last}"
    return False


def supervise(case: Case, tiny: Path, work: Path) -> dict[str, Any]:
    """In a child with its bounds; its end is part of what is told."""
    work.mkdir(parents=True)
    if (child := os.fork()) == 0:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
            log = os.open(work / "log.txt", os.O_WRONLY | os.O_CREAT)
            for stream in (0, 1, 2):
                os.dup2(log if stream else os.open(os.devnull, os.O_RDONLY), stream)
            take(case, tiny, work)
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + WALL_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    path = work / "told.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    told = Told(case.name, peak=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
    last_words = (work / "log.txt").read_text(errors="replace")[-LAST_WORDS:]
    code = os.waitstatus_to_exitcode(ended[1])
    found = outcome.read(code, None, asked=None, out_of_memory=False, last_words=last_words)
    if isinstance(found, Failed) and found.failure in ("user", "memory"):  # as its worker would have told it
        told.failure = {"failure": found.failure, "code": found.code, "message": found.message, "field": found.field}
    else:
        told.escaped = f"{found}\n{last_words}"
    return asdict(told)


def main(folder: Path, tiny: Path, part: int, of: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what trainers and libraries print is none
    from core.train.__main__ import importing
    from core.train.entry.standby import imports

    with importing():
        imports()
    global ORDER
    ORDER = order(NOWHERE / "model", NOWHERE)
    take(Case("none", lambda folder: None), tiny, work := folder / "none")  # all that is loaded at the first use
    print((work / "told.json").read_text(), file=answers, flush=True)
    gc.collect()
    gc.freeze()
    for number, case in enumerate(chosen()):
        if number % of == part:
            print(json.dumps(supervise(case, tiny, folder / str(number))), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
