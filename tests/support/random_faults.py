"""Runs that random faults disturb: `python -m tests.support.random_faults MODEL FOLDER SEED…`.

A seed decides everything: which faults meet a run of LoRA with dropout, when, and where. Attempts are forked from this
process, which has imported everything and computed nothing. A fault of a process is a SIGKILL before any operation on a
file, or at any moment; a full disk is the kernel's limit on the size of files. A store fails when operations on files
of the run end with EIO, for once or for good, and is slow when each takes up to a tenth of a second until the process
is killed. A fault of the disk meets a checkpoint
or a snapshot in memory between two attempts: a torn file, a flipped bit, a file that is gone, a truncated manifest.
Snapshots are brought to the disk, or left for the next attempt. After its faults the run is left to its end.

For each seed a line of JSON: the faults, and what is wrong (None: nothing). Nothing is wrong when the final weights are
those of the undisturbed run to the bit, and no attempt continued from a checkpoint that a fault had met.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core.spec.run.checkpoint_names import progress_of
from core.spec.run.exit_codes import EXIT_FAILED, EXIT_NO_SPACE, EXIT_OK
from core.spec.run.folder import CHECKPOINTS
from core.spec.run.manifest import MANIFEST
from core.storage.checkpoints import Snapshots
from tests.support.trainer import events, pairs, run, weights, write_rows, write_run

AXES: dict[str, Any] = {
    "method": {"type": "lora", "r": 4, "lora_dropout": 0.1},
    "optimizer": {"learning_rate": 1e-2},
    "training": {
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "precision": "bf16",
        "max_length": 64,
    },
    "checkpoint": {"save_steps": 2, "keep_last": 3, "memory_steps": 1},
}
OF_PROCESS = ("killed at an operation", "killed at a moment", "full disk")
OF_STORE = ("failing store", "slow store")
OF_DISK = ("torn file", "flipped bit", "file gone", "manifest truncated")
OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
MOST_ATTEMPTS = 12
MANY = 10_000


def disturbed(model: Path, folder: Path, seed: int) -> tuple[list[str], str | None]:
    """The faults that met the run, and what is wrong with it."""
    draw = random.Random(seed)
    rows = folder / "rows.jsonl"
    told: list[str] = []
    met: set[Path] = set()
    attempts: list[Path] = []
    job, snapshots = f"job-{seed}", Snapshots(folder / "memory", folder)
    left = [draw.choice(OF_PROCESS + OF_STORE) for _ in range(draw.randint(1, 3))]
    while len(attempts) < MOST_ATTEMPTS:
        number = len(attempts) + 1
        run_dir, memory = folder / job / f"attempt-{number}", snapshots.attempt(job, number)
        earlier = snapshots.left(job) + attempts[::-1]
        write_run(run_dir, model, rows, resume_from=earlier, memory_dir=memory, **AXES)
        attempts.append(run_dir)
        fault = left.pop(0) if left else None
        code = run(run_dir, prepare=None if fault is None else prepared(fault, draw, run_dir))
        for event in events(run_dir, "resumed"):
            if Path(event["path"]) in met:
                return told, f"attempt {number} continued from {event['path']}, which a fault had met"
        if fault is not None:
            told.append(fault)
        if code == EXIT_OK:
            return told, None if weights(run_dir) == weights(folder / "calm") else "the final weights differ"
        if fault is None:
            return told, f"attempt {number} ended with {code}: {events(run_dir)[-1:]}"
        of_store = fault == "failing store" and code == EXIT_FAILED and failed_store(run_dir)
        if code not in (-signal.SIGKILL, EXIT_NO_SPACE) and not of_store:
            return told, f"attempt {number} ended with {code} after: {fault}"
        if draw.random() < 0.7 and (kind := damaged(draw, [*attempts, *snapshots.left(job)], met)) is not None:
            told.append(kind)
        if draw.random() < 0.5:
            bring_down(snapshots, job, run_dir)
    return told, f"no end after {MOST_ATTEMPTS} attempts"


def failed_store(run_dir: Path) -> bool:
    """Whether the run says what it was, so that its job is retried."""
    told = events(run_dir, "error")
    return bool(told) and (told[-1]["failure"], told[-1]["code"]) == ("machine", "storage_failed")


def bring_down(snapshots: Snapshots, job: str, run_dir: Path) -> None:
    """What a worker does when an attempt has ended. Otherwise the next attempt finds the snapshots in memory."""
    for aside in (run_dir / "checkpoints").glob("tmp-*"):
        shutil.rmtree(aside)
    snapshots.bring_down(job, run_dir)


def prepared(fault: str, draw: random.Random, run_dir: Path) -> Callable[[], None]:
    """What the process of an attempt does to itself before it runs."""
    match fault:
        case "killed at an operation":
            left = draw.randint(1, 700)

            def count(event: str, arguments: object) -> None:
                nonlocal left
                if event in OPERATIONS:
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            return lambda: sys.addaudithook(count)
        case "killed at a moment":
            after = draw.uniform(0.0, 1.5)

            def wait() -> None:
                time.sleep(after)
                os.kill(os.getpid(), signal.SIGKILL)

            return lambda: threading.Thread(target=wait, daemon=True).start()
        case "failing store":
            good, bad = draw.randint(0, 30), draw.choice((1, 2, MANY))

            def fail(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal good, bad
                if not of_checkpoints(event, arguments, run_dir) or bad == 0:
                    return
                good -= 1
                if good < 0:
                    bad -= 1
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))

            return lambda: sys.addaudithook(fail)
        case "slow store":
            slowest, end = draw.uniform(0.0, 0.1), draw.randint(1, 60)
            waits = random.Random(draw.random())

            def slow(event: str, arguments: tuple[Any, ...]) -> None:
                nonlocal end
                if of_checkpoints(event, arguments, run_dir):
                    time.sleep(waits.uniform(0.0, slowest))
                    end -= 1
                    if end == 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            return lambda: sys.addaudithook(slow)
        case _:
            size = draw.choice((2_000, 12_000, 40_000))

            def limit() -> None:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

            return limit


def of_checkpoints(event: str, arguments: tuple[Any, ...], run_dir: Path) -> bool:
    """Whether it is an operation on a file below the run's checkpoints."""
    return event in OPERATIONS and str(arguments[0]).startswith(str(run_dir / CHECKPOINTS))


def damaged(draw: random.Random, attempts: list[Path], met: set[Path]) -> str | None:
    """Do something to a checkpoint, mostly the furthest; None where there is none."""
    found = [path for run_dir in attempts for path in (run_dir / "checkpoints").glob("step-*") if path not in met]
    found.sort(key=lambda path: progress_of(path.name) or (0, 0, 0))
    if not found:
        return None
    checkpoint = found[-1] if draw.random() < 0.8 else draw.choice(found)
    kind = draw.choice(OF_DISK)
    files = sorted(path for path in checkpoint.iterdir() if path.name != MANIFEST and path.stat().st_size)
    file = checkpoint / MANIFEST if kind == "manifest truncated" else draw.choice(files)
    content = bytearray(file.read_bytes())
    match kind:
        case "flipped bit":
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            file.write_bytes(content)
        case "file gone":
            file.unlink()
        case _:
            file.write_bytes(content[: draw.randrange(len(content))])
    met.add(checkpoint)
    return kind


def faults(model: Path, folder: Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What became of each of the seeds; see the module."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", pairs(17))
    calm = write_run(folder / "calm", model, folder / "rows.jsonl", **AXES)
    if (code := run(calm)) != EXIT_OK:
        raise SystemExit(f"the undisturbed run ended with {code}: {(calm / 'log.txt').read_text()}")
    for seed in seeds:
        met, wrong = disturbed(model, folder, seed)
        if wrong is None:
            shutil.rmtree(folder / f"job-{seed}")
            Snapshots(folder / "memory", folder).forget(f"job-{seed}")
        yield {"seed": seed, "faults": met, "wrong": wrong}


def main() -> int:
    bad = 0
    for told in faults(Path(sys.argv[1]), Path(sys.argv[2]), [int(seed) for seed in sys.argv[3:]]):
        print(json.dumps(told), flush=True)
        bad += told["wrong"] is not None
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
