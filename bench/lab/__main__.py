"""The queue through a week of an 8-GPU lab: `python -m bench.lab [--runs N] [--only WEEK] [--trace FILE]`.

The service's own scheduler with a simulated clock (bench/lab/schedule.py) against schedules of the same weeks by other
rules (bench/lab/peers.py): FIFO, first fit, an oracle that knows how long jobs take, and a bound that nothing can beat.
The weeks: `generated` anew for each run (1,000 jobs, 12 users, one of whom submits a quarter of all jobs in half an
hour); `philly-like`, from a file, which is no recording (bench/lab/week.py says what it is); and with `--trace` a
recording of an installation (`python -m bench.lab.record`). The first generated week is there twice more: with a time
limit on every job (`limits`), and with the flood at priority -10 in a project that allows preemption (`preempt`).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.lab import peers, week
from bench.lab.figures import Figures, measure
from bench.lab.peers import Outcome
from bench.lab.schedule import Week
from bench.lab.week import DAY, FLOODER, HOUR, Task
from bench.report import compare, finish

RULES = {"fifo": peers.fifo, "first fit": peers.first_fit, "oracle": peers.oracle}
COMPARED = ("utilisation", "idle_while_waiting", "mean_wait", "p95_wait", "longest_wait", "mean_slowdown", "fairness")


Limits = dict[tuple[str, str], dict[str, Any]]


def ours(tasks: Sequence[Task], gpus: int, limits: Limits | None = None) -> list[Outcome]:
    """In memory where there is a place for it: what is measured is the order, not the disk."""
    memory = Path("/dev/shm")  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="eft-lab-", dir=memory if memory.is_dir() else None) as folder:
        lab = Week(Path(folder), tasks, gpus, limits=limits)
        try:
            return [run.outcome for run in lab.run()]
        finally:
            lab.close()


def one_week(
    name: str, tasks: Sequence[Task], gpus: int, length: float, *, variants: bool = False
) -> dict[str, Figures]:
    """All schedules of a week, by their names, told as they are done."""
    fair_ends = peers.fair(tasks, gpus)
    owners, wide = len({task.owner for task in tasks}), sum(task.gpus > 1 for task in tasks)
    work = sum(task.work for task in tasks)
    print(
        f"\n{name}: {len(tasks)} jobs of {owners} owners, {wide} of them on several GPUs; {work / HOUR:.0f} GPU hours, "
        f"{work / (gpus * length):.0%} of {gpus} GPUs for {length / DAY:g} days"
    )
    known = {rule: measure(schedule(tasks, gpus), gpus, length, fair_ends) for rule, schedule in RULES.items()}
    began = time.perf_counter()
    found = {"ours": measure(ours(tasks, gpus), gpus, length, fair_ends)}
    print(f"  (the scheduler took {time.perf_counter() - began:.0f} s for it)")
    if variants:
        limited = [replace(task, limit=task.limit or math.ceil(2 * task.seconds)) for task in tasks]
        found["limits"] = measure(ours(limited, gpus), gpus, length, fair_ends)
        yielding = [replace(task, priority=-10 if task.owner == FLOODER else 0) for task in tasks]
        room = ours(yielding, gpus, {("project", FLOODER): {"preemptible": True}})
        found["preempt"] = measure(room, gpus, length, fair_ends)
    found |= known
    print(
        f"  {'':<10} {'used':>6} {'idle*':>6} {'mean wait':>10} {'median':>8} {'p95':>8} {'longest':>8} "
        f"{'slowdown':>9} {'Jain':>6} {'stopped':>8}"
    )
    for rule, figures in found.items():
        print(
            f"  {rule:<10} {figures.utilisation:>6.1%} {figures.idle_while_waiting:>6.1%} "
            f"{_time(figures.mean_wait):>10} {_time(figures.median_wait):>8} {_time(figures.p95_wait):>8} "
            f"{_time(figures.longest_wait):>8} {figures.mean_slowdown:>9.2f} {figures.fairness:>6.3f} "
            f"{figures.stopped:>8}"
        )
    bound = peers.bound(tasks, gpus)
    least = sum(bound[task.name] - task.submit for task in tasks) / len(tasks)
    mean = found["ours"].mean_turnaround
    print("  * of the GPU time while somebody waited; slowdown: (end - submit) / run time, of ten minutes at least")
    print(f"  mean from submit to end: ours {_time(mean)}, no schedule less than {_time(least)}")
    print(f"  {'owner':<6} {'jobs':>5} {'GPU h':>6}   median, p95 wait and slowdown, time by the fair ideal's:")
    for owner, mine in found["ours"].owners.items():
        theirs = found["fifo"].owners[owner]
        print(
            f"  {owner:<6} {mine.jobs:>5} {mine.gpu_hours:>6.0f}   ours {_time(mine.median_wait):>7} "
            f"{_time(mine.p95_wait):>7} {mine.slowdown:>6.1f} {mine.against_fair:>6.2f}   fifo "
            f"{_time(theirs.median_wait):>7} {_time(theirs.p95_wait):>7} {theirs.slowdown:>6.1f} "
            f"{theirs.against_fair:>6.2f}"
        )
    sys.stdout.flush()
    return found


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="generated weeks, of the seeds 1 to N")
    parser.add_argument("--only", choices=("generated", "philly-like"))
    parser.add_argument("--trace", type=Path, help="a recorded week (bench/lab/record.py) in place of the others")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--gpus", type=int, default=8)
    options = parser.parse_args()
    weeks: list[tuple[str, list[Task], float]] = []
    if options.trace is not None:
        tasks = week.read(options.trace)
        days = max(1.0, -(-tasks[-1].submit // DAY))
        weeks.append(("recorded", tasks, days * DAY))
    else:
        if options.only != "philly-like":
            for seed in range(1, options.runs + 1):
                tasks = week.generated(seed, jobs=options.jobs, users=options.users, gpus=options.gpus)
                weeks.append(("generated", tasks, week.WEEK))
        if options.only != "generated":
            weeks.append(("philly-like", week.read(week.PHILLY_LIKE), week.WEEK))
    series: dict[tuple[str, str, str], tuple[list[float], list[float]]] = {}
    for name, tasks, length in weeks:
        first = not any(key[0] == name for key in series)
        found = one_week(name, tasks, options.gpus, length, variants=first and name == "generated")
        for figure in COMPARED:
            for peer in RULES:
                mine, theirs = series.setdefault((name, figure, peer), ([], []))
                mine.append(getattr(found["ours"], figure))
                theirs.append(getattr(found[peer], figure))
    print()
    finish(
        {
            f"lab_{name.replace('-', '_')}_{figure}_against_{peer.replace(' ', '_')}": compare(mine, theirs)
            for (name, figure, peer), (mine, theirs) in series.items()
            if all(theirs)  # an oracle may have left nothing idle, and nothing divides by it
        }
    )


if __name__ == "__main__":
    main()
