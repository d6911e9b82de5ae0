"""What becomes of whole schedules, over made-up labs and a clock that jumps: nothing that goes ahead delays who has
slots kept, wide jobs do not starve, and making room comes to an end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from core.db import migrate
from core.db.engine import Database
from tests.support.play import Made, Play

EXAMPLES = settings(
    max_examples=int(os.environ.get("EFT_TEST_SCHEDULES", "6")),
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
)
"""EFT_TEST_SCHEDULES: look at so many more."""
SCALE = 600.0


@pytest.fixture(scope="module")
def clocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, list[float]]]:
    clock = [0.0]
    database = Database(f"sqlite:///{tmp_path_factory.mktemp('play') / 'eft.db'}", clock=lambda: clock[0])
    event.listen(database._writer, "connect", lambda connection, _: connection.execute("PRAGMA synchronous=OFF"))
    migrate.upgrade(database)
    yield database, clock
    database.dispose()


def never_twice(play: Play, jobs: dict[str, Made]) -> None:
    """No slot has two runs at once, each run has as many as it needs, of one node, and every job is over."""
    for run in play.runs:
        assert len(set(run.slots)) == len(run.slots) == jobs[run.name].gpus, run
        assert jobs[run.name].box in (None, run.node), run
    spans: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for run in play.runs:
        for slot in run.slots:
            spans.setdefault((run.node, slot), []).append((run.began, run.ended, run.name))
    for slot, held in spans.items():
        held.sort()
        for before, after in pairwise(held):
            assert before[1] <= after[0] + 1e-6, (slot, before, after)
    trained = {name: sum(run.ended - run.began for run in play.runs if run.name == name) for name in jobs}
    assert trained == pytest.approx({name: job.work for name, job in jobs.items()})


@st.composite
def labs(draw: st.DrawFn) -> list[Made]:
    """About a dozen jobs of one to four GPUs; half of them say their limit, which is what they take or more."""
    made = []
    for n in range(draw(st.integers(6, 12))):
        work = draw(st.integers(1, 12)) * SCALE
        limit = draw(st.sampled_from([None, 1.0, 1.0, 2.0]))
        made.append(
            Made(
                f"j{n}",
                draw(st.integers(0, 6)) * SCALE / 2,
                work,
                draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
                draw(st.sampled_from(["ada", "bob", "cyd"])),
                limit=None if limit is None else int(work * limit),
                told=draw(st.sampled_from([True, True, True, False])),
            )
        )
    return made


@EXAMPLES
@given(labs())
def test_what_goes_ahead_delays_nobody(clocked: tuple[Database, list[float]], made: list[Made]) -> None:
    """Every job for which slots were kept starts no later than in the schedule without those that went ahead of it."""
    jobs = {job.name: job for job in made}
    play = Play(*clocked, {"box-1": 4})
    play.run(made)
    never_twice(play, jobs)
    for name in play.kept:
        ahead = {run.name for run in play.runs if name in run.ahead_of}
        if not ahead:
            continue
        without = Play(*clocked, {"box-1": 4})
        without.run([job for job in made if job.name not in ahead])
        assert play.began(name) <= without.began(name) + 1e-6, (name, ahead)


@st.composite
def quarrels(draw: st.DrawFn) -> list[Made]:
    """Jobs of three priorities in two projects, one of which lets itself be preempted."""
    made = []
    for n in range(draw(st.integers(5, 10))):
        made.append(
            Made(
                f"j{n}",
                draw(st.integers(0, 12)) * 50.0,
                draw(st.integers(1, 12)) * 50.0,
                draw(st.sampled_from([1, 1, 2, 3])),
                draw(st.sampled_from(["ada", "bob"])),
                draw(st.sampled_from(["lab", "lab", "thesis"])),
                draw(st.sampled_from([-5, 0, 5])),
                told=draw(st.booleans()),
                box=draw(st.sampled_from([None, None, "box-1", "box-2"])),
            )
        )
    return [job for job in made if job.gpus <= (1 if job.box == "box-2" else 3)]


@EXAMPLES
@given(quarrels(), st.sampled_from([75.0, 100.0, 400.0]))
def test_making_room_comes_to_an_end(
    clocked: tuple[Database, list[float]], made: list[Made], min_seconds: float
) -> None:
    """No two drive each other out, whoever makes room has trained long enough and is of a lower priority, whoever it is
    made for starts at once, and everything is over in the end, after exactly its work."""
    jobs = {job.name: job for job in made}
    play = Play(*clocked, {"box-1": 3, "box-2": 1}, min_seconds, preemptible=("lab",))
    play.run(made)
    never_twice(play, jobs)
    driven = {(waiting, victim) for waiting, victims in play.asked for victim in victims}
    for waiting, victim in driven:
        assert jobs[waiting].priority > jobs[victim].priority, (waiting, victim)
        assert jobs[victim].project == "lab" and (victim, waiting) not in driven
    left = [run for run in play.runs if run.made_room]
    assert sorted(run.name for run in left) == sorted(victim for _, victims in play.asked for victim in victims)
    assert all(run.ended - run.began >= min_seconds - 1e-6 for run in left), "none before its time"
    at = {(run.name, run.began) for run in play.runs}
    for waiting, victims in play.asked:
        moments = {run.ended for run in left if run.name in victims}
        assert any((waiting, moment) in at for moment in moments), f"{waiting} did not start though {victims} left"


def test_a_wide_job_does_not_starve(clocked: tuple[Database, list[float]]) -> None:
    """Narrow jobs of two owners, of whom nobody has used anything, come without end; a job of all slots of somebody who
    has used some is at work before twice the length of the longest, and the box has idled for little of that."""
    made = random.Random(1)
    narrow = []
    for n in range(24):
        owner, limit = made.choice(["ada", "bob"]), made.choice([None, 600])
        narrow.append(Made(f"n{n}", 100.0 * n, made.randint(2, 6) * 100.0, owner=owner, limit=limit))
    play = Play(*clocked, {"box-1": 4})
    play.run([*narrow, Made("wide", 400.0, 300.0, 4, "cyd"), Made("late", 450.0, 300.0, 3, "ada")])
    assert play.began("wide") <= 400.0 + 1200.0
    assert play.began("late") <= 450.0 + 3000.0
