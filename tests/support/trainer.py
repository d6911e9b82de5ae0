"""Run folders and trainer processes for tests."""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from core.base import collector
from core.base.process import die_with_parent
from core.spec.files import data_orders
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder

if TYPE_CHECKING:
    from core.train.base.stop import Stop

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
"""One thread: the runs are tiny, and equal to the bit wherever they run."""
PLAIN = {"type": "model", "pairs": "joined"}
"""How rows of `pairs` become tokens: plain strings, as TRL takes them."""


def pairs(count: int) -> list[dict[str, str]]:
    """Rows of different lengths."""
    return [{"prompt": f"count to {n}:" + " go" * (n % 5), "completion": " " + "x" * (n % 7 + 1)} for n in range(count)]


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": "ok " * (n % 4 + 1)}]}
        for n in range(count)
    ]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_run(
    run_dir: Path,
    model_dir: Path,
    train: Path,
    *,
    held_out: Path | None = None,
    resume_from: list[Path] | None = None,
    fence_seconds: float | None = None,
    cache_dir: Path | None = None,
    memory_dir: Path | None = None,
    **axes: Any,
) -> Path:
    """A run folder with its order; `axes` are fields of the job. Rows are rendered as PLAIN says,
    unless `axes` has data of its own."""
    data: dict[str, Any] = {"train": str(train)} | ({"eval": str(held_out)} if held_out else {})
    data["rendering"] = PLAIN
    spec = resolve(parse_job({"model": str(model_dir), "data": data, **axes}))
    rows_of, held_rows = data_orders(spec.data, lambda source, field: ([Path(source.path)], {}))
    order = RunOrder(
        job_id="job-test",
        attempt=1,
        spec=spec,
        model_dir=str(model_dir),
        model_source={"type": "local", "path": str(model_dir)},
        train=rows_of,
        eval=held_rows,
        resume_from=[str(folder) for folder in resume_from or []],
        cache_dir=str(cache_dir) if cache_dir else None,
        memory_dir=str(memory_dir) if memory_dir else None,
        fence_seconds=fence_seconds,
        world_size=spec.resources.gpus,
    )
    run_dir.mkdir(parents=True)
    (run_dir / ORDER_FILE).write_text(order.model_dump_json())
    return run_dir


def start(run_dir: Path, *command: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """`python -m core.train RUN_DIR` as a process of its own (or another command line for the same folder)."""
    with (run_dir / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *(command or ("-m", "core.train")), str(run_dir)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdin=stdin,
            stdout=log,
            stderr=log,
        )


class Forked:
    """`python -m core.train RUN_DIR` as a fork of this process, which has imported what a run imports; with `stop`,
    only the run; with `program`, that one in place of the trainer's. `prepare`: what the fork does first. A fork hangs
    where OpenMP has had threads (tests/conftest.py)."""

    def __init__(
        self,
        run_dir: Path,
        stop: Stop | None = None,
        prepare: Callable[[], None] | None = None,
        program: Callable[[], int] | None = None,
    ) -> None:
        trainer = _imported()
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            die_with_parent(signal.SIGKILL)  # no trainer outlives the tests
            gc.freeze()  # what tests hold is no business of its collector's
            log = (run_dir / "log.txt").open("a", buffering=1)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout = sys.stderr = log  # pytest has its own
            os.environ.update(ENVIRONMENT)
            if prepare is not None:
                prepare()
            sys.argv = ["core.train", str(run_dir)]
            code = (program or trainer.main)() if stop is None else sys.modules["core.train.recipe"].run(run_dir, stop)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def poll(self, how: int = os.WNOHANG) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, how)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self) -> int:
        """Its exit status, negative for a signal."""
        try:
            code = self.poll(0)
        except BaseException:  # the test's time is over
            self.send_signal(signal.SIGKILL)
            self.poll(0)
            raise
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(run_dir: Path, stop: Stop | None = None, prepare: Callable[[], None] | None = None) -> int:
    """A run in a fork of this process, and its exit status. It leaves nothing behind in this process, and is spared
    what Python's collector does with all that tests hold: a third of a second in each run."""
    return Forked(run_dir, stop, prepare).wait()


def killed_after(event: Callable[[str, dict[str, Any]], bool]) -> Callable[[], None]:
    """For a fork's `prepare`: have it killed once it has written such an event, given by its type and its fields."""

    def prepare() -> None:
        from core.train.base.events import EventWriter

        write = EventWriter.write

        def deadly(writer: EventWriter, type: Any, /, **fields: Any) -> int:
            seq = write(writer, type, **fields)
            if event(type, fields):
                os.kill(os.getpid(), signal.SIGKILL)
            return seq

        EventWriter.write = deadly  # type: ignore[method-assign]

    return prepare


@functools.cache
def _imported() -> Any:
    """The trainer's program, once all is here that its forks would import or load each for itself."""
    from core.train import __main__ as trainer
    from core.train.entry import standby
    from core.train.kernels import native

    with collector.importing():
        standby.imports()
        native.library()
    return trainer


def events(run_dir: Path, type: str | None = None) -> list[dict[str, Any]]:
    path = run_dir / EVENTS_FILE
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    found = [json.loads(line) for line in whole.splitlines()]
    return [event for event in found if type is None or event["type"] == type]


def notices(run_dir: Path) -> list[dict[str, Any]]:
    """Return the run's notices but for those that advise on its steps, which every tiny run of a test earns."""
    return [event for event in events(run_dir, "notice") if event["code"] not in ("few_steps", "long_warmup")]


class Polled(Protocol):
    def poll(self) -> int | None: ...


def wait_until(condition: Callable[[], bool], process: Polled, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the trainer ended before"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def weights_file(run_dir: Path) -> Path:
    """The final weights."""
    (path,) = (run_dir / "artifacts").glob("*/*model.safetensors")
    return path


def weights(run_dir: Path) -> str:
    """SHA-256 of the final weights. Not the bytes: where they differ, pytest compares them line by line, which with CI
    set or -vv does not end before the test's time limit."""
    return hashlib.sha256(weights_file(run_dir).read_bytes()).hexdigest()


def log(run_dir: Path) -> str:
    path = run_dir / "log.txt"
    return path.read_text() if path.exists() else ""
