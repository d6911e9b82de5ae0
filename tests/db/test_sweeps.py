"""Sweeps in the database: runs in the queue, early comparisons that are made once, and the end."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import insert, select

from core.db.engine import Database
from core.db.tables import Delivery, Job, Metric, SweepRow, Webhook
from core.errors import Conflict
from core.jobs.base.slots import Slot
from core.jobs.base.transitions import Actor, Token
from core.jobs.lifecycle import claims, deletion, submit
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.sweeps import advance, records, wishes
from core.jobs.policies.volume import QueueFull, VolumeLimits
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from tests.support.killed_change import killed

ADA = Actor("user-ada", "proj-lab", "req-1")
SPEC = {"type": "grid", "fields": {"training.seed": [0]}, "metric": "eval_loss", "goal": "min", "halving": None}


def make(
    database: Database, runs: int, halving: Mapping[str, Any] | None = None, **bounds: int
) -> tuple[str, list[str]]:
    spec = resolve(JobSpec.model_validate({"model": "m", "data": "file-0123456789abcdefghjkmnpqrs"}))
    told = [({"training.seed": number}, spec) for number in range(runs)]
    with database.write() as session:
        sweep = wishes.create(session, ADA, "rates", SPEC | {"halving": halving}, told, VolumeLimits(**bounds)).id
    with database.read() as session:
        return sweep, [job.id for job in records.runs_of(session, sweep)]


def start(database: Database, number: int) -> Token:
    """Prepare and claim the job whose turn it is."""
    for slot in (Slot(f"prepare-{number}", "prepare"), Slot(f"cpu-{number}", "cpu")):
        with database.write() as session:
            claim = claims.claim(session, "worker", "node", slot, 600)
            if claim is None:
                continue
            claims.running(session, claim.token)
            if claim.kind == "prepare":
                finish(session, claim.token, claim.kind, Succeeded({"path": "m"}), 0, RetryPolicy())
    assert claim is not None, "nothing waits"
    return claim.token


def end(database: Database, token: Token, outcome: Outcome) -> None:
    with database.write() as session:
        finish(session, token, "train", outcome, 0, RetryPolicy())


def measure(database: Database, token: Token, step: int, value: float) -> None:
    with database.write() as session:
        owned = {"owner_id": ADA.user_id, "project_id": ADA.project_id}
        about = {"job_id": token.job_id, "name": "eval_loss", "step": step, "attempt": token.attempt}
        session.execute(insert(Metric).values(**owned, **about, value=value, time=0.0))


def turn(database: Database) -> list[bool]:
    with database.read() as session:
        due = advance.due(session)
    return [advance.advance(database, one) for one in due]


def look(database: Database, sweep: str) -> tuple[str, str, list[str]]:
    with database.read() as session:
        row = session.get_one(SweepRow, sweep)
        return row.status, row.reason, [job.status for job in records.runs_of(session, sweep)]


def figures(value: float) -> Succeeded:
    return Succeeded({"train_loss": 9.0, "eval_after": {"eval_loss": value}})


def test_runs_are_ordinary_jobs_and_the_best_is_named_at_the_end(database: Database) -> None:
    with database.write() as session:
        about = {"name": "ci", "kind": "standard", "url": "https://ci", "secrets": [], "all_jobs": True}
        owned = {"owner_id": ADA.user_id, "project_id": ADA.project_id}
        session.execute(insert(Webhook).values(id="hook-1", events=["sweep.succeeded"], **about, **owned))
    sweep, jobs = make(database, 3)
    for number, outcome in enumerate((figures(2.0), figures(1.5), Failed("user", "x", "boom"))):
        assert turn(database) == []
        end(database, start(database, number), outcome)
    assert turn(database) == [True] and turn(database) == []
    status, reason, states = look(database, sweep)
    assert (status, states) == ("succeeded", ["succeeded", "succeeded", "failed"])
    assert reason == f"2 of 3 runs succeeded, 1 failed; best: `{jobs[1]}` with eval_loss 1.5"
    with database.read() as session:
        (notice,) = session.execute(select(Delivery)).scalars()
    assert (notice.type, notice.data["id"], notice.data["best"]) == ("sweep.succeeded", sweep, jobs[1])
    assert notice.data["reason"] == reason and notice.data["finished_at"] is not None
    with database.write() as session:
        wishes.remove(session, ADA, sweep)
        assert session.get_one(Job, jobs[0]).sweep_id is None


def test_all_of_its_runs_or_none(database: Database) -> None:
    with pytest.raises(QueueFull):
        make(database, 3, waiting=2)
    with database.read() as session:
        assert session.execute(select(Job)).all() == session.execute(select(SweepRow)).all() == []


def test_the_worse_runs_stop_at_a_comparison_and_the_others_go_on(database: Database) -> None:
    sweep, jobs = make(database, 4, {"steps": [2, 4], "keep": 0.5})
    for number, value in enumerate((3.0, 1.0, 2.0)):
        token = start(database, number)
        assert token.job_id == jobs[number]
        measure(database, token, 2, value)
        assert turn(database) == [True], "it is paused until the others have come to the step"
        end(database, token, Requeued("stopped"))
    assert look(database, sweep)[2] == ["paused", "paused", "paused", "queued"]
    last = start(database, 3)
    measure(database, last, 2, 4.0)
    with ThreadPoolExecutor(3) as threads:  # any number of housekeepers
        list(threads.map(lambda _: advance.advance(database, sweep), range(3)))
    status, reason, states = look(database, sweep)
    assert (status, reason) == ("running", "compared 4 runs at step 2: 2 continue")
    assert states == ["cancelled", "queued", "queued", "stopping"]
    with database.read() as session:
        assert session.get_one(Job, jobs[0]).reason == (
            "stopped early by its sweep: eval_loss 3 at step 2 was number 3 of 4, and the best 2 continue"
        )
    end(database, last, Requeued("stopped"))
    with database.read() as session:
        why = session.get_one(Job, jobs[3]).reason
        assert why.startswith("stopped early by its sweep: eval_loss 4 at step 2"), "also once its trainer has ended"
    token = start(database, 5)
    assert token.job_id == jobs[1] and turn(database) == [False]
    end(database, token, figures(0.5))
    end(database, start(database, 6), figures(0.9))
    assert turn(database) == [True]
    assert look(database, sweep)[1] == (f"2 of 4 runs succeeded, 2 stopped early; best: `{jobs[1]}` with eval_loss 0.5")


def test_a_process_that_is_killed_at_any_point_makes_a_comparison_once_or_not_at_all(database: Database) -> None:
    """At every statement and every commit of the comparison, and then of the sweep's end."""
    sweep, jobs = make(database, 3, {"steps": [2], "keep": 0.3})
    for number, value in enumerate((3.0, 1.0, 2.0)):
        token = start(database, number)
        measure(database, token, 2, value)
        if number < 2:
            turn(database)
            end(database, token, Requeued("stopped"))
    before = look(database, sweep)
    at = 1
    while killed(database, lambda other: advance.advance(other, sweep), at):
        if look(database, sweep) != before:
            break  # the last point: it was killed once all was committed
        at += 1
    assert at > 8, "it was killed at each of its statements"
    if look(database, sweep) == before:
        assert turn(database) == [True]
    assert look(database, sweep)[2] == ["cancelled", "queued", "stopping"]
    with database.read() as session:
        (made,) = session.get_one(SweepRow, sweep).rungs
    assert (made["step"], set(made["stopped"])) == (2, {jobs[0], jobs[2]})
    end(database, token, Requeued("stopped"))
    end(database, start(database, 5), figures(0.5))
    at = 1
    while look(database, sweep)[0] == "running" and killed(database, lambda other: advance.advance(other, sweep), at):
        at += 1
    status, reason, _ = look(database, sweep)
    assert at > 3 and (status, reason.partition(";")[0]) == ("succeeded", "1 of 3 runs succeeded, 2 stopped early")


def test_cancel_ends_every_run_and_nothing_is_deleted_before(database: Database) -> None:
    sweep, jobs = make(database, 3)
    end(database, start(database, 0), figures(1.0))
    with database.write() as session, pytest.raises(Conflict, match=r"run of `sweep-.*which is running"):
        deletion.remove(session, ADA, jobs[0], deletion.Freed(), 1.0)
    with database.write() as session, pytest.raises(Conflict, match="the sweep is running"):
        wishes.remove(session, ADA, sweep)
    running = start(database, 1)
    with database.write() as session:
        assert wishes.cancel(session, ADA, sweep).status == "cancelled"
        assert wishes.cancel(session, ADA, sweep).status == "cancelled"
    assert look(database, sweep)[2] == ["succeeded", "stopping", "cancelled"]
    assert turn(database) == []
    end(database, running, Requeued("stopped"))
    with database.write() as session:
        assert deletion.remove(session, ADA, jobs[0], deletion.Freed(), 1.0)
        submit.find(session, ADA, jobs[1])
