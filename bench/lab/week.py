"""Weeks of a lab: what was submitted when, by whom, how wide and how long. Drawn by a seed, or read from a file.

A file is CSV with the columns of `Task`, times in whole seconds from the week's first midnight (a Monday), names made
up. `philly_like.csv` is no recording: nobody's week of an 8-GPU box is published in a form that could be kept here. It
was drawn once, by `philly_like`, from the distributions by which Narayanan et al. (Gavel, OSDI 2020) describe
Microsoft's Philly cluster (Jeon et al., ATC 2019). `python -m bench.lab.record` makes such a file of what an
installation of eft has run, and `python -m bench.lab --trace FILE` takes it.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TextIO

HOUR, DAY, WEEK = 3600.0, 86_400.0, 7 * 86_400.0
FLOODER = "u00"
SHORTEST = 60.0
LONGEST = 1 / 7
"""Of the whole time: a day of a week."""
HERE = Path(__file__).parent
PHILLY_LIKE = HERE / "philly_like.csv"


@dataclass(frozen=True, slots=True)
class Task:
    """A job, with what only the future knows."""

    name: str
    owner: str
    submit: float
    """Seconds from the beginning of the week; no two are equal."""
    gpus: int
    seconds: float
    """That it holds its GPUs for, if nobody disturbs it. Schedulers do not know it; an oracle does."""
    limit: int | None
    """`resources.max_runtime_seconds`; None: its owner has set none."""
    priority: int = 0

    @property
    def work(self) -> float:
        """GPU seconds."""
        return self.seconds * self.gpus


def generated(
    seed: int,
    *,
    jobs: int = 1000,
    users: int = 12,
    gpus: int = 8,
    days: float = 7.0,
    load: float = 0.85,
    flood: float = 0.25,
) -> list[Task]:
    """A lab's week. `load`: GPU seconds asked for, by those there are. `flood`: the share of the jobs that one of the
    users submits within half an hour on the first afternoon, each of one GPU, beside whatever the others do.

    Lengths are log-normal (sigma 1.6: the longest tenth makes about two thirds of the work), of the others' jobs one in
    five needs 2, 4 or all GPUs; they come by day rather than by night and few at weekends; some users submit ten times
    as many as others. Every second job has a time limit, a generous one.
    """
    dice = random.Random(seed)  # noqa: S311 -- no secret
    names = [f"u{number:02d}" for number in range(users)]
    many = round(jobs * flood)
    drawn = [
        (FLOODER, (9 + 7 + dice.random() / 2) * HOUR if days >= 1 else dice.uniform(0, HOUR), 1) for _ in range(many)
    ]
    weights = [1 / rank for rank in range(1, users)]
    widths = [width for width in (1, 2, 4, 8) if width <= gpus]
    for _ in range(jobs - many):
        owner = dice.choices(names[1:], weights)[0]
        drawn.append((owner, _moment(dice, days), dice.choices(widths, (80, 10, 7, 3)[: len(widths)])[0]))
    tasks = []
    for number, (owner, at, width) in enumerate(sorted(drawn, key=lambda one: one[1])):
        seconds = math.exp(dice.gauss(math.log(12 * 60), 1.6))
        tasks.append(Task(f"j{number:04d}", owner, at + number * 1e-3, width, seconds, None))
    return _at_load(tasks, dice, load * gpus, days * DAY)


def philly_like(seed: int = 20190710, *, jobs: int = 320, users: int = 10, gpus: int = 8) -> list[Task]:
    """What `philly_like.csv` was made with: Poisson arrivals; 70, 10, 15 and 5 % of the jobs with 1, 2, 4 and 8 GPUs;
    10^U(1.5, 3) minutes for four in five of them and 10^U(3, 4) for the rest, all divided so that they ask for 90 % of
    the week. Owners and time limits are ours, since the source has none."""
    dice = random.Random(seed)  # noqa: S311 -- no secret
    weights = [1 / rank for rank in range(1, users + 1)]
    times = sorted(dice.uniform(0, WEEK) for _ in range(jobs))
    tasks = []
    for number, at in enumerate(times):
        owner = f"u{dice.choices(range(users), weights)[0]:02d}"
        width = dice.choices((1, 2, 4, 8), (70, 10, 15, 5))[0]
        low, high = (1.5, 3.0) if dice.random() < 0.8 else (3.0, 4.0)
        seconds = 60 * 10 ** dice.uniform(low, high)
        tasks.append(Task(f"j{number:04d}", owner, at + number * 1e-3, min(width, gpus), seconds, None))
    return _at_load(tasks, dice, 0.9 * gpus, WEEK)


def _moment(dice: random.Random, days: float) -> float:
    """Busy from nine to seven, with something at night, and a third of it at weekends."""
    while True:
        at = dice.uniform(0, days * DAY)
        hour, weekday = at % DAY / HOUR, int(at // DAY) % 7
        likely = 1.0 if 9 <= hour < 19 else 0.15 if hour < 8 else 0.4
        if dice.random() < likely * (0.33 if weekday >= 5 else 1.0):
            return at


def _at_load(tasks: list[Task], dice: random.Random, busy: float, length: float) -> list[Task]:
    """Lengths multiplied so that they keep `busy` GPUs for the time `length`, then time limits."""
    for _ in range(20):  # what is cut off at the ends is made up for by the others
        scale = busy * length / sum(task.work for task in tasks)
        tasks = [replace(task, seconds=min(max(task.seconds * scale, SHORTEST), length * LONGEST)) for task in tasks]
    result = []
    for task in tasks:
        seconds = float(round(task.seconds))
        limit = None
        if dice.random() < 0.5:
            limit = math.ceil(seconds * dice.uniform(1.2, 4.0) / 900) * 900
        result.append(replace(task, seconds=seconds, limit=limit))
    return result


# -- files


def write(tasks: Sequence[Task], file: TextIO) -> None:
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(field.name for field in fields(Task))
    for task in tasks:
        limit = "" if task.limit is None else task.limit
        rows.writerow(
            (task.name, task.owner, f"{task.submit:.3f}", task.gpus, round(task.seconds), limit, task.priority)
        )


def read(path: Path) -> list[Task]:
    """Raises ValueError for a file that is none."""
    with path.open(newline="") as file:
        tasks = [
            Task(
                row["name"],
                row["owner"],
                float(row["submit"]),
                int(row["gpus"]),
                float(row["seconds"]),
                int(row["limit"]) if row["limit"] else None,
                int(row["priority"]),
            )
            for row in csv.DictReader(file)
        ]
    times = [task.submit for task in tasks]
    if not tasks or times != sorted(set(times)) or min(task.seconds for task in tasks) <= 0:
        raise ValueError(f"{path}: submits must grow from row to row, and every job takes some time")
    return tasks
