"""Room for higher priorities: who is asked to leave, for whom, and who never is."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select, update

from core.db.engine import Database, db_now
from core.db.tables import Audit, Event, Job, Node
from core.jobs.base.stop_reasons import StopReason
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, finish
from core.jobs.policies import holds, maintenance
from core.jobs.scheduling import preempt
from core.jobs.scheduling.preempt import PreemptionSettings
from tests.support.lab import QUEUE_SETTINGS, Lab, gpu

RULES = PreemptionSettings(600.0, 600.0, leave_seconds=0.0)


@pytest.fixture
def lab(database: Database) -> Lab:
    made = Lab(database)
    made.box("box-1", [gpu(n) for n in range(4)])
    return made


def runs(lab: Lab, name: str, trained: float = 1000.0, **fields: Any) -> None:
    lab.job(name, age=500.0 - len(lab.ids), **fields)
    claim = lab.turn("box-1")
    assert claim is not None and lab.name(claim.token.job_id) == name
    lab.tell(name, 50_000.0, trained=trained)


def allow(lab: Lab, project: str = "lab") -> None:
    lab.limit("project", project, preemptible=True)


def ask(lab: Lab, rules: PreemptionSettings = RULES) -> list[tuple[str, list[str]]]:
    with lab.database.write() as session:
        if not preempt.possible(session):
            return []
        done = preempt.ask(session, rules)
    return [(lab.name(one.waiting), sorted(map(lab.name, one.victims))) for one in done]


def leave(lab: Lab, name: str) -> None:
    claim = lab.held[name]
    with lab.database.write() as session:
        finish(session, claim.token, "train", Requeued("asked to preempt"), 75, RetryPolicy())


def test_one_makes_room_and_goes_on_later(lab: Lab) -> None:
    allow(lab)
    for n in range(4):
        runs(lab, f"low{n}", trained=1000.0 + n)
    lab.job("same")
    assert ask(lab) == []
    lab.job("urgent", "bob", priority=5)
    assert ask(lab) == [("urgent", ["low0"])], "the one that began last"
    assert ask(lab) == [], "it is on its way out already"
    with lab.database.read() as session:
        row = session.get_one(Job, lab.ids["low0"])
        assert (row.status, row.stop_requested) == ("running", StopReason.PREEMPT)
    assert lab.why("urgent").aside == "1 running job of a lower priority makes room for it"
    leave(lab, "low0")
    told = lab.why("low0")
    with lab.database.read() as session:
        row = session.get_one(Job, lab.ids["low0"])
        assert (row.status, row.stop_requested) == ("queued", None)
        assert row.reason == f"made room and waits to continue: {lab.ids['urgent']} has priority 5"
        events = dict(session.execute(select(Event.type, Event.data).where(Event.job_id == row.id)).all())
        assert (events["preempted"]["by"], events["preempted"]["priority"]) == (lab.ids["urgent"], 5)
        theirs = select(Event.data).where(Event.job_id == lab.ids["urgent"], Event.type == "preempts")
        assert session.execute(theirs).scalar_one()["jobs"] == [row.id]
        entry = session.execute(select(Audit).where(Audit.action == "job.preempt")).scalar_one()
        assert (entry.target, entry.data["by"]) == (row.id, lab.ids["urgent"])
        assert entry.project_id == row.project_id
    assert (told.aside or "").endswith(f"{lab.ids['urgent']} has priority 5") and "made room at" in (told.aside or "")
    claim = lab.turn("box-1")
    assert claim is not None and lab.name(claim.token.job_id) == "urgent"
    lab.end(lab.held["low1"])
    claim = lab.turn("box-1")
    assert claim is not None and (lab.name(claim.token.job_id), claim.token.attempt) == ("low0", 2)
    with lab.database.read() as session:
        assert session.get_one(Job, lab.ids["low0"]).preempted is None


CASES: dict[str, Any] = {
    "a project that does not allow it": lambda lab: [runs(lab, f"x{n}", gpus=1) for n in range(4)],
    "a run that has just begun": lambda lab: [allow(lab), *(runs(lab, f"x{n}", trained=300.0) for n in range(4))],
    "a run that has not trained yet": lambda lab: [
        allow(lab),
        *(runs(lab, f"x{n}") for n in range(4)),
        _forget_steps(lab),
    ],
    "an equal priority": lambda lab: [allow(lab), *(runs(lab, f"x{n}", priority=5) for n in range(4))],
    "slots that are held for people": lambda lab: [allow(lab), *(runs(lab, f"x{n}") for n in range(4)), _hold(lab)],
    "a drained node": lambda lab: [allow(lab), *(runs(lab, f"x{n}") for n in range(4)), _drain(lab)],
    "a silent node": lambda lab: [allow(lab), *(runs(lab, f"x{n}") for n in range(4)), _silence(lab)],
    "one that is over in a moment": lambda lab: [
        allow(lab),
        *(runs(lab, f"x{n}") for n in range(4)),
        [lab.tell(f"x{n}", 50.0, trained=1000.0) for n in range(4)],
    ],
    "a quota that holds who waits": lambda lab: [
        allow(lab),
        lab.limit("owner", "bob", max_running=0),
        *(runs(lab, f"x{n}") for n in range(4)),
    ],
}


def _forget_steps(lab: Lab) -> None:
    with lab.database.write() as session:
        session.execute(update(preempt.Attempt).values(training_at=None))


def _hold(lab: Lab) -> None:
    actor = lab.actor("ada")
    with lab.database.write() as session:
        holds.hold(session, actor, [f"box-1/{n}" for n in range(4)], held_for="bob", why="")


def _drain(lab: Lab) -> None:
    with lab.database.write() as session:
        session.execute(update(Node).values(drained_at=db_now()))


def _silence(lab: Lab) -> None:
    with lab.database.write() as session:
        session.execute(update(Node).values(heartbeat_at=db_now() - 3600))


@pytest.mark.parametrize("case", CASES)
def test_nobody_is_asked_of(lab: Lab, case: str) -> None:
    CASES[case](lab)
    lab.job("urgent", "bob", priority=5)
    assert ask(lab, PreemptionSettings(600.0, 600.0, leave_seconds=100.0)) == []


def test_nobody_is_asked_in_vain_and_no_more_than_needed(lab: Lab) -> None:
    """Of two singles that may be asked, one of two and one that may not, a gang of four finds no room; one of three
    takes the pair and a single; one of two the pair alone, and not two jobs."""
    allow(lab)
    runs(lab, "a")
    runs(lab, "pair", gpus=2)
    runs(lab, "fixed", owner="bob", project="thesis")
    lab.job("four", gpus=4, priority=5)
    assert ask(lab) == []
    lab.job("two", gpus=2, priority=4)
    assert ask(lab) == [], "what may come together for the four is not taken from them"
    with lab.database.write() as session:
        session.execute(update(Job).where(Job.id == lab.ids["four"]).values(status="paused"))
    assert ask(lab) == [("two", ["pair"])]
    lab.job("one", priority=3)
    assert ask(lab) == [("one", ["a"])]


def test_lower_priorities_before_higher_ones_and_free_slots_first(lab: Lab) -> None:
    allow(lab)
    for n, priority in enumerate((2, 0, 1)):
        runs(lab, f"p{priority}", priority=priority, trained=5000.0 - n)
    lab.job("two", gpus=2, priority=5)
    assert lab.turn("box-1") is None
    assert ask(lab) == [("two", ["p0"])], "one slot is free, one is needed"
    assert ask(lab) == []
    lab.job("more", gpus=2, priority=5)
    assert ask(lab) == [("more", ["p1", "p2"])]


def test_who_should_have_been_over_long_ago_is_not_waited_for(lab: Lab) -> None:
    """Its slot is as good as free for a while; then it writes large files, or hangs, and somebody else makes room."""
    allow(lab)
    for n in range(4):
        runs(lab, f"low{n}")
    lab.tell("low3", 0.0, trained=1000.0)
    lab.job("urgent", "bob", priority=5)
    assert ask(lab) == []
    lab.wait(400)
    assert ask(lab) == [("urgent", ["low2"])]


def test_another_project_is_not_named(lab: Lab) -> None:
    allow(lab)
    for n in range(4):
        runs(lab, f"low{n}")
    lab.job("urgent", "bob", "thesis", priority=5)
    ((waiting, (victim,)),) = ask(lab)
    assert waiting == "urgent"
    leave(lab, victim)
    with lab.database.read() as session:
        row = session.get_one(Job, lab.ids[victim])
        told = [repr(data) for (data,) in session.execute(select(Event.data).where(Event.job_id == row.id))]
        assert row.reason.endswith("a job of another project has priority 5")
        assert not [words for words in told if lab.ids["urgent"] in words]
        theirs = session.execute(select(Event.data).where(Event.job_id == lab.ids["urgent"], Event.type == "preempts"))
        assert (theirs.scalar_one()["jobs"], lab.why(victim, QUEUE_SETTINGS).aside is not None) == ([], True)


def test_a_maintenance_before_its_end_is_no_room(lab: Lab) -> None:
    allow(lab)
    for n in range(4):
        runs(lab, f"low{n}")
    actor = lab.actor("ada")
    now = lab.database.now()
    with lab.database.write() as session:
        maintenance.plan(session, actor, "box-1", now + 1000, now + 2000, "fans")
    lab.job("long", priority=5, limit=3000)
    assert ask(lab) == []
    lab.job("short", priority=4, limit=900)
    assert [waiting for waiting, _ in ask(lab)] == ["short"]
