"""The dashboard in headless Chromium: `python -m bench.web [--runs N] [--metrics N] [--steps N] [--jobs N]`.

Compare holds `runs` jobs with `metrics` curves of `steps` steps beside each other: time to the first paint and to the
drawn curves, when the server reads the curves for the first time and when it has kept them; frames while zooming;
memory of the page. Jobs scrolls through `jobs` rows: time to load them all, and frames while scrolling. Rows are
written to the database directly, in the form in which workers write them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.api import _json, our_server
from bench.report import finish, hardware
from core.ids import new_id
from tests.support.browser import MISSING, Browser, browser, programs

NAMES = (
    "loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_bytes", "total_tokens", "epoch", "reward", "kl",
    "entropy",
)  # fmt: skip
FRAMES = """const [work, frames] = arguments, done = arguments[arguments.length - 1], times = [];
const step = new Function("n", work);
let last = performance.now(), n = 0;
const frame = () => { const now = performance.now(); if (n) times.push(now - last); last = now;
  if (n++ < frames) { step(n); requestAnimationFrame(frame); } else done(times); };
requestAnimationFrame(frame);"""
ZOOM = """const half = {half} * (0.05 + 0.45 * Math.abs(Math.cos(n / 20)));
for (const {{ u }} of {which}) u.setScale("x", {{ min: {half} - half, max: {half} + half }});"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.web")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--metrics", type=int, default=10, choices=range(1, len(NAMES) + 1))
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=10_000)
    asked = parser.parse_args()
    if programs() is None:
        raise SystemExit(f"this bench needs {MISSING}")
    print(hardware(), flush=True)
    with tempfile.TemporaryDirectory(prefix="eft-web-") as name, ExitStack() as stack:
        folder = Path(name)
        database = folder / "eft.db"
        ours, headers, file_id = our_server(f"sqlite:///{database}", folder, stack)
        spec = {"name": "one of many", "model": "org/model", "data": {"train": file_id}}
        first = _json(ours, "POST", "/jobs", json.dumps(spec).encode(), headers)["id"]
        began = time.monotonic()
        compared = _fill(database, first, asked.jobs, asked.runs, NAMES[: asked.metrics], asked.steps)
        points = asked.runs * asked.metrics * asked.steps
        print(f"{asked.jobs:,} jobs and {points:,} points written in {time.monotonic() - began:.0f} s", flush=True)
        window = stack.enter_context(browser(f"http://{ours.address}", folder))
        window.size(1440, 900)
        window.go("ui/signin")
        window.type("input[name=key]", headers["Authorization"].removeprefix("Bearer "))
        window.click("button.main")
        window.find("header.bar")
        results = {"compare": _compare(window, compared, asked.steps), "jobs": _jobs(window, asked.jobs)}
    for page, figures in results.items():
        for what, value in figures.items():
            print(f"{page:<8} {what:<44} {value:>12,.1f}", flush=True)
    finish({page: figures | {"hardware": hardware()} for page, figures in results.items()})


def _fill(database: Path, first: str, jobs: int, runs: int, names: tuple[str, ...], steps: int) -> list[str]:
    """Make copies of the job that are over, and curves for some of them; the ids of those."""
    with sqlite3.connect(database, timeout=60) as connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM jobs WHERE id = ?", (first,)).fetchone())
        now = row["created_at"]
        ids = [new_id("job") for _ in range(jobs)]
        columns = ", ".join(f'"{name}"' for name in row)
        marks = ", ".join("?" for _ in row)
        over = {"status": "succeeded", "reason": "finished", "queue_key": row["queue_key"], "attempt": 2}

        def copies() -> Iterator[tuple[Any, ...]]:
            for number, job_id in enumerate(ids):
                figures = {"train_loss": 1 + 1 / (number + 1), "steps": steps}
                ended = {"started_at": now + 1, "finished_at": now + 100 + number, "result": json.dumps(figures)}
                made = row | over | ended | {"id": job_id, "name": f"run {number}", "created_at": now + number * 1e-3}
                yield tuple(made.values())

        connection.executemany(f"INSERT INTO jobs ({columns}) VALUES ({marks})", copies())  # noqa: S608
        connection.execute("DELETE FROM events WHERE job_id = ?", (first,))

        def values() -> Iterator[tuple[Any, ...]]:
            numbers = random.Random(0)  # noqa: S311
            for number, job_id in enumerate(ids[-runs:]):
                for name in names:
                    for step in range(1, steps + 1):
                        value = math.exp(-step / steps * 3) + number * 0.01 + numbers.random() * 0.05
                        yield job_id, name, step, 2, value, now + step, row["owner_id"], row["project_id"]

        connection.executemany(
            "INSERT INTO metrics (job_id, name, step, attempt, value, time, owner_id, project_id) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values(),
        )
    connection.close()
    return ids[-runs:]


def _compare(window: Browser, jobs: list[str], steps: int) -> dict[str, float]:
    found: dict[str, float] = {}
    path = "ui/compare?" + "&".join(f"job={one}" for one in jobs)
    for which in ("cold", "kept"):
        window.go(path)
        window.wait(lambda: window.run("return eft.drawn > 0"), "the curves", 600)
        found[f"{which}: first paint, ms"] = window.run(
            "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
        )
        found[f"{which}: curves drawn, ms"] = window.run("return eft.drawnAt")
    one = ZOOM.format(half=steps / 2, which="[eft.charts.get('loss')]")
    every = ZOOM.format(half=steps / 2, which="eft.charts.values()")
    found |= _frames(window, "zoom of one chart", one, 120) | _frames(window, "zoom of all charts", every, 20)
    window.cdp("HeapProfiler.collectGarbage")
    found["heap of the page, MB"] = window.run("return performance.memory.usedJSHeapSize / 1e6")
    found["lines"] = window.run("return [...eft.charts.values()].reduce((sum, { lines }) => sum + lines.length, 0)")
    return found


def _jobs(window: Browser, count: int) -> dict[str, float]:
    window.go("ui/jobs")
    window.find("#jobs tbody tr")
    began = time.monotonic()

    def loaded() -> bool:
        window.run("scrollTo(0, document.documentElement.scrollHeight)")
        return bool(window.run("return eft.rows.all.length >= arguments[0]", count))

    window.wait(loaded, "all jobs", 600)
    found = {"all rows loaded, s": time.monotonic() - began}
    window.run("scrollTo(0, 0)")
    time.sleep(1)
    found |= _frames(window, "scroll by 120 px a frame", "scrollBy(0, 120)", 300)
    jump = "scrollTo(0, (n * 7919 % 100) / 100 * document.documentElement.scrollHeight)"
    found |= _frames(window, "jump to anywhere each frame", jump, 60)
    found["rows in the page"] = window.run("return document.querySelectorAll('#jobs tbody tr').length")
    window.cdp("HeapProfiler.collectGarbage")
    found["heap of the page, MB"] = window.run("return performance.memory.usedJSHeapSize / 1e6")
    return found


def _frames(window: Browser, what: str, work: str, frames: int) -> dict[str, float]:
    times = sorted(window.run_async(FRAMES, work, frames))
    return {
        f"{what}: median frame, ms": statistics.median(times),
        f"{what}: 99th of 100 frames, ms": times[int(len(times) * 0.99) - 1],
        f"{what}: longest frame, ms": times[-1],
    }


if __name__ == "__main__":
    main()
