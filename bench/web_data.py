"""The curves of bench/web.py, and how they come into our database. Rows are written in bulk, in the form in which the
worker's relay writes them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np

from core.ids import new_id

NAMES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "total_tokens", "epoch", "reward", "kl",
    "entropy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much is shown."""

    runs: int
    names: tuple[str, ...]
    steps: int
    longest: int
    """Steps of the one curve of a further job."""

    @property
    def points(self) -> int:
        return self.runs * len(self.names) * self.steps


def curve(run: int, name: str, steps: int) -> list[float]:
    """Values of a metric of a run: they fall, with noise and a few spikes."""
    numbers = np.random.default_rng([run, NAMES.index(name)])
    values = np.exp(-np.arange(1, steps + 1) / steps * 3) + run * 0.01 + numbers.random(steps) * 0.05
    values[numbers.integers(steps, size=3)] += 1
    return list(map(float, values))


def fill(database: Path, first: str, jobs: int, wanted: Wanted) -> list[str]:
    """Make copies of the job that are over, and curves for some of them; the ids of those, the longest one last."""
    with closing(sqlite3.connect(database, timeout=60, isolation_level=None)) as connection:
        connection.executescript("PRAGMA cache_size = -400000; PRAGMA synchronous = OFF")
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM jobs WHERE id = ?", (first,)).fetchone())
        ids = [new_id("job") for _ in range(jobs)]
        columns = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" for _ in row)
        connection.execute("BEGIN IMMEDIATE")
        copies = _copies(row, ids, wanted.steps)
        connection.executemany(f"INSERT INTO jobs ({columns}) VALUES ({marks})", copies)  # noqa: S608
        connection.execute("DELETE FROM events WHERE job_id = ?", (first,))
        connection.execute("COMMIT")
        compared = ids[-wanted.runs - 1 :]
        for number, job_id in enumerate(compared):
            last = number == wanted.runs
            connection.execute("BEGIN IMMEDIATE")
            for name in ("loss",) if last else sorted(wanted.names):
                steps = wanted.longest if last else wanted.steps
                values = curve(number, name, steps)
                times = (row["created_at"] + step for step in count(1))
                owners = repeat(row["owner_id"]), repeat(row["project_id"])
                connection.executemany(
                    "INSERT INTO metrics (job_id, name, step, attempt, value, time, owner_id, project_id) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    zip(repeat(job_id), repeat(name), count(1), repeat(2), values, times, *owners, strict=False),
                )
            connection.execute("COMMIT")
    return compared


def _copies(row: dict[str, Any], ids: list[str], steps: int) -> Iterator[tuple[Any, ...]]:
    now = row["created_at"]
    for number, job_id in enumerate(ids):
        figures = json.dumps({"train_loss": 1 + 1 / (number + 1), "steps": steps})
        ended = {"started_at": now + 1, "finished_at": now + 100 + number, "result": figures}
        over = {"status": "succeeded", "reason": "finished", "attempt": 2, "created_at": now + number * 1e-3}
        yield tuple((row | over | ended | {"id": job_id, "name": f"run {number}"}).values())
