"""The scheduler through a day of a lab, with a simulated clock (bench/lab): nobody starves, nothing is given twice, it
is fairer than a list and wastes no more. `python -m bench.lab` has whole weeks and the figures."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.lab import figures, peers, week
from bench.lab.peers import Outcome
from bench.lab.record import recorded
from bench.lab.schedule import LEAVES_AFTER, LOADS_FOR, MONDAY, Run, Week
from bench.lab.week import DAY, FLOODER, HOUR, Task

GPUS = 8
MOMENT = 1e-3
"""Seconds since 1970 are kept to less than a microsecond."""


MakeLab = Callable[..., AbstractContextManager[Week]]


@pytest.fixture(scope="module")
def lab(template: Callable[[str], tuple[str, Path]]) -> MakeLab:
    @contextmanager
    def made(
        folder: Path, tasks: Sequence[Task], limits: dict[tuple[str, str], dict[str, Any]] | None = None
    ) -> Iterator[Week]:
        folder.mkdir(exist_ok=True)
        shutil.copyfile(template("sqlite")[1], folder / "week.db")  # migrated, as Week would do it
        week_of = Week(folder, tasks, GPUS, limits=limits)
        try:
            yield week_of
        finally:
            week_of.close()

    return made


@pytest.fixture(scope="module")
def day() -> list[Task]:
    """100 jobs of eight users; one of them submits thirty in the afternoon."""
    return week.generated(4, jobs=100, users=8, gpus=GPUS, days=1.0, flood=0.3)


@pytest.fixture(scope="module")
def served(day: list[Task], lab: MakeLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Week, list[Run]]]:
    with lab(tmp_path_factory.mktemp("day"), day) as made:
        yield made, made.run()


def schedule(runs: Sequence[Run]) -> dict[str, list[tuple[float, tuple[str, ...]]]]:
    """Name → (start, slots) of its spans."""
    return {
        run.outcome.task.name: [(since, slots) for (since, _), slots in zip(run.outcome.spans, run.slots, strict=True)]
        for run in runs
    }


def test_every_job_gets_what_it_asked_for_once(day: list[Task], served: tuple[Week, list[Run]]) -> None:
    held: dict[str, list[tuple[float, float]]] = {}
    for run in served[1]:
        ((since, to),) = run.outcome.spans
        assert to - since == pytest.approx(run.outcome.task.seconds)
        assert since >= run.outcome.task.submit - MOMENT
        (slots,) = run.slots
        assert len(set(slots)) == run.outcome.task.gpus
        for slot in slots:
            held.setdefault(slot, []).append((since, to))
    assert len(held) == GPUS
    for slot, spans in held.items():
        spans.sort()
        for (_, to), (since, _) in itertools.pairwise(spans):
            assert since >= to - MOMENT, f"{slot} was given twice"


def test_it_is_fairer_than_a_list_and_wastes_no_more(day: list[Task], served: tuple[Week, list[Run]]) -> None:
    fair_ends = peers.fair(day, GPUS)
    ours = figures.measure([run.outcome for run in served[1]], GPUS, DAY, fair_ends)
    fifo = figures.measure(peers.fifo(day, GPUS), GPUS, DAY, fair_ends)
    assert ours.fairness > fifo.fairness + 0.1
    assert ours.utilisation > fifo.utilisation - 0.02
    assert ours.idle_while_waiting < fifo.idle_while_waiting + 0.02
    assert ours.mean_slowdown < fifo.mean_slowdown
    # Nobody pays for another's flood: who floods waits for their own jobs.
    flooded = ours.owners[FLOODER].median_wait
    assert all(owner.median_wait < flooded for name, owner in ours.owners.items() if name != FLOODER)
    assert ours.longest_wait < fifo.longest_wait + 2 * HOUR
    # What is compared with is what it says: nothing beats the bound, and the oracle is near it.
    bound = peers.bound(day, GPUS)
    least = sum(bound[task.name] - task.submit for task in day) / len(day)
    known = figures.measure(peers.oracle(day, GPUS), GPUS, DAY, fair_ends)
    assert least < known.mean_turnaround < ours.mean_turnaround


def test_the_same_day_is_the_same_schedule(
    day: list[Task], served: tuple[Week, list[Run]], lab: MakeLab, tmp_path: Path
) -> None:
    with lab(tmp_path, day) as again:
        assert schedule(again.run()) == schedule(served[1])


def test_a_wide_job_does_not_starve_beside_narrow_ones(lab: MakeLab, tmp_path: Path) -> None:
    """More work of one GPU than there is room for, without an end; whoever fits goes first in `first_fit`, and the job
    of all GPUs waits for the last of them. Here GPUs are kept for it from its turn on."""
    narrow = [Task(f"n{number:03d}", "u01", 60.0 + 390 * number, 1, HOUR, None) for number in range(60)]
    wide = Task("wide", "u02", 2 * HOUR + 1, GPUS, 600.0, None)
    tasks = sorted([*narrow, wide], key=lambda task: task.submit)

    def wait(outcomes: Sequence[Outcome]) -> float:
        return next(one.wait for one in outcomes if one.task is wide)

    assert wait(peers.first_fit(tasks, GPUS)) > 4 * HOUR
    with lab(tmp_path, tasks) as made:
        outcomes = [run.outcome for run in made.run()]
    assert wait(outcomes) <= HOUR + 1, "no longer than the longest of those that ran when its turn came"


def test_who_makes_room_loses_nothing_and_goes_on(lab: MakeLab, tmp_path: Path) -> None:
    """All GPUs are taken by jobs of low priority in a project that allows it; an urgent one comes, and a second."""
    low = [Task(f"low{number}", "u01", float(number), 1, 4 * HOUR, None, -10) for number in range(GPUS)]
    urgent = [Task(f"urgent{number}", "u02", HOUR * (number + 1), GPUS // 2, HOUR, None) for number in range(2)]
    with lab(tmp_path, [*low, *urgent], {("project", "u01"): {"preemptible": True}}) as made:
        runs = {run.outcome.task.name: run for run in made.run()}
    soon = LEAVES_AFTER + MOMENT
    assert all(runs[task.name].outcome.wait <= soon and len(runs[task.name].outcome.spans) == 1 for task in urgent)
    stopped = [runs[task.name].outcome for task in low if len(runs[task.name].outcome.spans) > 1]
    assert sum(len(outcome.spans) - 1 for outcome in stopped) == 2 * (GPUS // 2), "as many as were needed, each time"
    for outcome in stopped:
        held, stops = sum(to - since for since, to in outcome.spans), len(outcome.spans) - 1
        assert held == pytest.approx(outcome.task.seconds + stops * (LEAVES_AFTER + LOADS_FOR), abs=1.0)


def test_what_was_run_can_be_recorded_as_a_week(day: list[Task], served: tuple[Week, list[Run]]) -> None:
    with served[0].database.read() as session:
        tasks, left_out = recorded(session, MONDAY, MONDAY + DAY)
    assert left_out == 0 and len(tasks) == len(day)
    assert [(task.gpus, task.seconds, task.limit) for task in tasks] == [
        (task.gpus, task.seconds, task.limit) for task in day
    ]
    assert [task.submit for task in tasks] == pytest.approx([task.submit for task in day], abs=0.01)
    assert len({(a.owner, b.owner) for a, b in zip(tasks, day, strict=True)}) == len({task.owner for task in day})


def test_the_file_is_what_it_says(tmp_path: Path) -> None:
    kept, drawn = week.read(week.PHILLY_LIKE), week.philly_like()
    assert [(task.name, task.owner, task.gpus, task.seconds, task.limit) for task in kept] == [
        (task.name, task.owner, task.gpus, task.seconds, task.limit) for task in drawn
    ]
    assert week.generated(7) == week.generated(7) != week.generated(8)
    with (tmp_path / "week.csv").open("w") as file:
        week.write(kept, file)
    assert week.read(tmp_path / "week.csv") == kept
