"""Long curves are thinned out into a file once, and what comes behind it is the same as what the database has."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, update

from core.db.engine import Database
from core.db.tables import Job, Metric
from core.jobs.views import curves, levels, queries
from core.storage.layout import Layout
from tests.db.conftest import ADA

POINTS = 20
Make = Callable[..., str]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "LONG", 200)
    monkeypatch.setattr(curves, "_kept", type(curves._kept)())


class Run:
    """A job that tells steps; its curve is held against the whole one at each look."""

    def __init__(self, database: Database, job: str, folder: Path) -> None:
        self.database, self.job = database, job
        self.layout = Layout(folder)
        self.file = self.layout.curves(job)
        self.file.parent.mkdir(parents=True)
        self.values = random.Random(5)
        self.is_now("running", 1)

    def is_now(self, status: str, attempt: int) -> None:
        self.attempt = attempt
        with self.database.write() as session:
            session.execute(update(Job).where(Job.id == self.job).values(status=status, attempt=attempt))

    def tell(self, first: int, last: int, name: str = "loss") -> None:
        owner = {"owner_id": ADA.user_id, "project_id": ADA.project_id, "job_id": self.job, "name": name}
        rows = []
        for step in range(first, last + 1):
            value = self.values.random() + (self.values.choice([50, -50]) if self.values.random() < 0.02 else 0)
            rows.append({**owner, "step": step, "attempt": self.attempt, "value": value, "time": 9.0 + step})
        with self.database.write() as session:
            session.execute(insert(Metric), rows)

    def look(self, name: str = "loss", points: int = POINTS) -> list[tuple[int, float]]:
        with self.database.read() as session:
            job = session.get(Job, self.job)
            assert job is not None
            seen = curves.curves(session, self.layout, job, [name], points, True)
            whole = queries.metric_series(session, self.job, name)
        thin, clock = seen[name], seen["seconds"]
        assert len(thin) <= points and set(thin) <= set(whole) and thin == sorted(thin)
        assert thin[0] == whole[0] and thin[-1] == whole[-1]
        for worst in (min, max):
            assert worst(value for _, value in thin) == worst(value for _, value in whole)
        assert clock[0] == (whole[0][0], 0.0) and clock[-1] == (whole[-1][0], whole[-1][0] - whole[0][0])
        return thin

    def covered(self) -> int:
        found = levels.load(self.file, self.attempt)
        return found["loss"].rows if "loss" in found else 0


@pytest.fixture
def run(database: Database, make_job: Make, tmp_path: Path) -> Run:
    return Run(database, make_job(), tmp_path)


def test_it_grows_with_the_run_through_retries_and_the_end(run: Run) -> None:
    seen = []
    for first in range(1, 600, 37):
        run.tell(first, first + 36)
        run.look()
        seen.append(run.covered())
    assert seen[0] == 0 < seen[-1] < 629, "the newest step may be told again"
    assert seen == sorted(seen) and len(set(seen)) < len(set(range(1, 600, 37))), "not written at every look"
    with run.database.write() as session:  # the newest step has a second value, say of the last evaluation
        session.execute(update(Metric).where(Metric.job_id == run.job, Metric.step == 629).values(value=99.0))
    assert max(value for _, value in run.look()) == 99.0

    run.is_now("running", 2)  # from a checkpoint: steps behind it are done again
    assert run.covered() == 0, "the file of another attempt does not count"
    for first in range(401, 900, 61):
        run.tell(first, first + 60)
        run.look()
    assert 400 < run.covered() < 950
    run.is_now("succeeded", 2)
    curves.prepare(run.database, run.layout, run.job)
    assert run.covered() == 949 // curves.RUN * curves.RUN
    assert not list(run.file.parent.glob(".*"))
    run.look()


def test_a_worker_keeps_the_file_of_a_running_job(run: Run) -> None:
    run.tell(1, 150)
    curves.prepare(run.database, run.layout, run.job)
    assert not run.file.exists(), "it is not long yet"
    run.tell(151, 1000)
    curves.prepare(run.database, run.layout, run.job)
    assert run.covered() == 999 // curves.RUN * curves.RUN, "all but the newest step, which may be told again"
    run.look()


def test_an_ended_job_is_answered_from_its_file(run: Run) -> None:
    run.tell(1, 1000)
    run.tell(1, 50, "lr")
    run.is_now("succeeded", 1)
    thin = run.look()
    curves._kept.clear()  # as a new process begins
    with run.database.write() as session:
        session.execute(delete(Metric).where(Metric.job_id == run.job, Metric.step < 990))
    with run.database.read() as session:
        job = session.get(Job, run.job)
        assert job is not None
        assert curves.curves(session, run.layout, job, ["loss"], POINTS, False) == {"loss": thin}


def test_asked_for_many_points_it_reads_the_whole_curve(run: Run) -> None:
    run.tell(1, 1000)
    run.is_now("succeeded", 1)
    curves.prepare(run.database, run.layout, run.job)
    run.look(points=100)
    with run.database.read() as session:
        whole = queries.metric_series(session, run.job, "loss")
    assert run.look(points=400) == queries.thin_out(whole, 400)


@pytest.mark.parametrize("ends", [(1, 4000), (3, 3990), (777, 3555), (33, 64), (2000, None), (None, 2500), (17, 9000)])
def test_a_part_of_a_curve_loses_no_extreme(run: Run, ends: tuple[int | None, int | None]) -> None:
    run.tell(1, 4000)
    run.is_now("succeeded", 1)
    curves.prepare(run.database, run.layout, run.job)
    first, last = ends
    with run.database.read() as session:
        job = session.get(Job, run.job)
        assert job is not None
        seen = curves.curves(session, run.layout, job, ["loss"], POINTS, True, first, last)
        whole = queries.metric_series(session, run.job, "loss", first, last)
    thin, clock = seen["loss"], seen["seconds"]
    assert len(thin) <= POINTS and set(thin) <= set(whole) and (thin[0], thin[-1]) == (whole[0], whole[-1])
    values = [value for _, value in whole]
    assert {min(values), max(values)} <= {value for _, value in thin}
    assert (clock[0], clock[-1]) == ((whole[0][0], whole[0][0] - 1), (whole[-1][0], whole[-1][0] - 1))


@pytest.mark.parametrize("harm", ["truncated", "rubbish", "restored"])
def test_a_file_that_does_not_fit_is_made_again(run: Run, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    run.tell(1, 1000)
    run.is_now("succeeded", 1)
    run.look()
    curves._kept.clear()
    content = run.file.read_bytes()
    match harm:
        case "truncated":
            run.file.write_bytes(content[: len(content) // 2])
        case "rubbish":
            run.file.write_bytes(b"\0" * 5000)
        case "restored":  # a database of before, in which the job went another way
            with run.database.write() as session:
                session.execute(delete(Metric).where(Metric.job_id == run.job, Metric.step > 700))
            run.tell(701, 900)
    run.look()
    assert run.covered() == (900 if harm == "restored" else 1000) // curves.RUN * curves.RUN
    assert ("is made again" in caplog.text) == (harm != "restored")


def test_of_a_deleted_job_nothing_is_made(run: Run) -> None:
    run.tell(1, 1000)
    run.is_now("succeeded", 1)
    run.file.parent.rmdir()
    run.look()
    assert not run.file.parent.exists()
