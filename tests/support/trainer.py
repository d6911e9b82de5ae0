"""Run folders and trainer processes for tests."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.spec.files import data_orders
from core.spec.load import parse_job
from core.spec.resolve import resolve
from core.spec.run.folder import EVENTS_FILE, ORDER_FILE
from core.spec.run.orders import RunOrder

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


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 200) -> None:
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
