"""The order of the queue: states as data, and what is claimed from them one after the other; an explanation counts the
same, since it asks the same function."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select

from core.db.engine import Database
from core.db.tables import Allocation, Attempt, Job, UsageDay, UsageTotal
from core.errors import SpecError
from core.jobs.base import shares
from core.jobs.base.shares import SLICE_SECONDS
from core.jobs.base.slots import Key, Needs, Slot
from core.jobs.policies import usage
from core.jobs.policies.quotas import MAX_PRIORITY
from tests.support.at_once import at_once
from tests.support.contender import claim_and_keep
from tests.support.lab import Lab, gpu

HOUR = 3600.0
Setup = Callable[[Lab], None]


@pytest.fixture
def lab(database: Database) -> Lab:
    found = Lab(database)
    found.box("box-1", [gpu(0)])
    return found


def jobs(*given: tuple[str, dict[str, Any]]) -> Setup:
    def setup(lab: Lab) -> None:
        for name, fields in given:
            lab.job(name, **fields)

    return setup


def both(*setups: Setup) -> Setup:
    def setup(lab: Lab) -> None:
        for one in setups:
            one(lab)

    return setup


def bob(**fields: Any) -> dict[str, Any]:
    return {"owner": "bob", **fields}


CASES: dict[str, tuple[Setup, list[str]]] = {
    "age alone": (jobs(("a", {}), ("b", {}), ("old", {"age": 99.0})), ["old", "a", "b"]),
    "priority before age": (
        jobs(("a", {}), ("low", {"priority": -5, "age": 99.0}), ("high", {"priority": 5})),
        ["high", "a", "low"],
    ),
    "equal owners take turns, the older first": (
        jobs(("a1", {}), ("a2", {}), ("a3", {}), ("b1", bob()), ("b2", bob())),
        ["a1", "b1", "a2", "b2", "a3"],
    ),
    "who has used more waits, until it is even": (
        both(
            lambda lab: lab.used("ada", 2.5 * SLICE_SECONDS),
            jobs(("a1", {"age": 99.0}), ("b1", bob()), ("b2", bob()), ("b3", bob()), ("b4", bob())),
        ),
        ["b1", "b2", "b3", "a1", "b4"],
    ),
    "use of other projects counts too": (
        both(
            lambda lab: lab.used("ada", HOUR, "thesis"),
            jobs(("a1", {"age": 99.0}), ("b1", bob())),
        ),
        ["b1", "a1"],
    ),
    "use fades: half after a half-life": (
        both(
            lambda lab: (lab.used("ada", 4 * HOUR, days_ago=21), lab.used("bob", HOUR))[0],  # half an hour, one hour
            jobs(("b1", bob(age=99.0)), ("a1", {})),
        ),
        ["a1", "b1"],
    ),
    "shares: twice as many, twice as much": (
        both(
            lambda lab: lab.limit("owner", "bob", shares=2.0),
            jobs(*((f"a{n}", {}) for n in range(3)), *((f"b{n}", bob()) for n in range(4))),
        ),
        ["a0", "b0", "b1", "a1", "b2", "b3", "a2"],
    ),
    "priority before shares": (
        both(
            lambda lab: lab.used("ada", 9 * HOUR),
            jobs(("b", bob()), ("urgent", {"priority": 1})),
        ),
        ["urgent", "b"],
    ),
    "only what the slot can serve": (
        jobs(
            ("cpu", {"accelerator": "cpu", "age": 99.0}),
            ("model is not there", {"prepared": False, "age": 99.0}),
            ("too large", {"requirements": {"min_memory_gb": 300.0}, "age": 99.0}),
            ("fits", {"requirements": {"min_memory_gb": 190.0, "bf16": True, "arch": ["gfx942", "sm_90"]}}),
            ("theirs", {"requirements": {"vendor": "nvidia"}}),
            ("any", {}),
        ),
        ["fits", "any"],
    ),
    "a quota of running jobs holds the rest": (
        both(
            lambda lab: lab.limit("project", "lab", max_running=2),
            jobs(*((f"a{n}", {}) for n in range(4)), ("b", bob(project="thesis")), ("b2", bob())),
        ),
        ["a0", "b", "a1"],
    ),
    "an owner's quota counts over projects": (
        both(
            lambda lab: lab.limit("owner", "ada", max_running=1),
            jobs(("a0", {}), ("a1", {"project": "thesis"}), ("b", bob())),
        ),
        ["a0", "b"],
    ),
    "a quota of queued jobs lets the next in when one has gone": (
        both(
            lambda lab: lab.limit("project", "lab", max_queued=1),
            jobs(("a0", {}), ("a1", {}), ("b", bob(project="thesis")), ("a2", {"priority": 3})),
        ),
        ["a2", "b", "a0", "a1"],
    ),
    "in a quota of queued jobs others count that this slot does not serve": (
        both(
            lambda lab: lab.limit("project", "lab", max_queued=1),
            jobs(("cpu", {"accelerator": "cpu"}), ("gpu", {"accelerator": "gpu"})),
        ),
        [],
    ),
    "GPU hours of a week": (
        both(
            lambda lab: lab.limit("project", "lab", gpu_hours_week=0.0),
            jobs(("a", {}), ("b", bob(project="thesis"))),
        ),
        ["b"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_claims_follow_the_order_and_the_explanation_counts_it(lab: Lab, case: str) -> None:
    setup, expected = CASES[case]
    setup(lab)
    assert lab.order_by_explanation() == expected
    assert lab.order_by_claims() == expected


def test_any_state_is_claimed_as_it_is_explained(lab: Lab) -> None:
    """And an explanation changes nothing: the same state has the same answer."""
    for seed in range(3):
        made = random.Random(seed)
        with lab.database.write() as session:
            for table in (Attempt, Allocation, UsageTotal):
                session.execute(table.__table__.delete())
            session.execute(Job.__table__.update().values(status="cancelled"))
        lab.ids = {}
        for owner in ("ada", "bob", "cyd", "dan"):
            if made.random() < 0.7:
                lab.used(
                    owner, made.uniform(0, 5 * SLICE_SECONDS), f"p{made.randrange(3)}-{seed}", days_ago=made.random()
                )
        for n in range(3):
            if made.random() < 0.6:
                lab.limit(
                    "project", f"p{n}-{seed}", max_running=made.randrange(1, 6), max_queued=made.choice([None, 2, 4])
                )
        for n in range(24):
            needs = made.choice([{}, {"accelerator": "gpu"}, {"requirements": {"bf16": True}}, {"accelerator": "cpu"}])
            owner, project = made.choice(["ada", "bob", "cyd", "dan"]), f"p{made.randrange(3)}-{seed}"
            lab.job(f"j{n}", owner, project, priority=made.choice([0, 0, 0, 5, -5]), age=made.uniform(0, 99), **needs)
        first, again = lab.order_by_explanation(), lab.order_by_explanation()
        assert first == again, seed
        assert first == lab.order_by_claims(), seed
        left = lab.explained()
        assert {one.code for one in left} <= {"quota", "requirements"}, seed
        assert len(left) + len(first) == 24


def test_nobody_starves_behind_owners_who_never_stop(lab: Lab) -> None:
    """One slot; bob and cyd always have five waiting, ada submits three, all of equal priority and of random length."""
    made = random.Random(7)
    lab.used("ada", 2 * HOUR)
    for n in range(3):
        lab.job(f"a{n}", age=-HOUR)  # the youngest of all
    won: list[str] = []
    count = 0
    while not {"a0", "a1", "a2"} <= set(won):
        for owner in ("bob", "cyd"):
            waiting = [name for name in lab.ids if name.startswith(owner) and name not in won]
            for _ in range(5 - len(waiting)):
                lab.job(f"{owner}{(count := count + 1)}", owner)
        claim = lab.claim()
        assert claim is not None
        won.append(lab.name(claim.token.job_id))
        lab.end(claim, made.uniform(0.2, 1.0) * HOUR)
        assert len(won) < 60, won
    lengths = Counter(name.rstrip("0123456789") for name in won)
    assert abs(lengths["bob"] - lengths["cyd"]) <= 4, lengths


def test_prepares_and_previews_have_the_same_order_and_cost_nobody(lab: Lab) -> None:
    lab.used("ada", HOUR)
    lab.job("a", prepared=False, age=99.0)
    lab.job("b", "bob", prepared=False)
    lab.job("urgent", prepared=False, priority=2)
    assert lab.order_by_claims(Slot("prepare", "prepare")) == ["urgent", "b", "a"]
    with lab.database.read() as session:
        assert usage.open_spans(session) == []


def test_priority_has_a_limit_that_an_admin_of_the_box_can_move(lab: Lab) -> None:
    lab.job("fine", priority=MAX_PRIORITY)
    with pytest.raises(SpecError, match="up to 10") as refused:
        lab.job("greedy", priority=MAX_PRIORITY + 1)
    assert (refused.value.field, refused.value.faults[0].code) == ("priority", "priority_too_high")
    lab.limit("project", "lab", max_priority=50)
    lab.job("allowed", priority=50)
    assert lab.order_by_claims() == ["allowed", "fine"]


def test_the_books(lab: Lab) -> None:
    """What ended is charged once, by the day, and counts the same before and after; what runs counts at once."""
    lab.job("a")
    lab.job("b", "bob")
    first, second = lab.claim(), lab.claim()
    assert first is not None and second is not None
    lab.end(first, 3 * HOUR)

    def now_used() -> dict[str, float]:
        with lab.database.read() as session:
            moment = lab.database.now()
            return shares.effective(usage.booked(session), usage.open_spans(session), moment, shares.HALF_LIFE_SECONDS)

    before = now_used()
    assert before["user-ada"] == pytest.approx(3 * HOUR, rel=0.01) and before["user-bob"] == SLICE_SECONDS
    with lab.database.write() as session:
        assert usage.charge(session) == 1
    with lab.database.write() as session:
        assert usage.charge(session) == 0
    assert now_used() == pytest.approx(before, rel=1e-4)
    with lab.database.read() as session:
        days = session.execute(select(func.sum(UsageDay.gpu_seconds), func.sum(UsageDay.cpu_seconds))).one()
    assert days == (pytest.approx(3 * HOUR, abs=5), 0.0)
    assert list(usage.by_day(86_400 * 5 - 10, 86_400 * 6 + 5)) == [(4, 10), (5, 86_400), (6, 5)]


def test_fading_is_the_integral_it_says() -> None:
    half_life, now = 1000.0, 5000.0
    steps = 20_000
    summed = sum(shares.faded(2000 / steps, now - (1000 + 2000 * (n + 0.5) / steps), half_life) for n in range(steps))
    assert shares.weighed(1000.0, 3000.0, now, half_life) == pytest.approx(summed, rel=1e-6)
    assert shares.weighed(1000.0, 1000.0, now, half_life) == 0.0


@pytest.mark.parametrize(
    "needs",
    [Needs("any"), Needs("gpu", 40_000, True, "amd", ("gfx90a", "gfx942"), ("fast", "rack=2"))],
)
def test_a_key_is_read_back(needs: Needs) -> None:
    for priority in (-100, 0, 7, 100):
        key = Key(needs, "proj-1", "user-1", priority)
        assert Key.parse(str(key)) == key


def test_contenders_in_processes_keep_a_quota(lab: Lab) -> None:
    """Three processes claim at once: a quota of two running jobs is never passed, whoever is quicker."""
    lab.limit("project", "lab", max_running=2)
    for n in range(12):
        lab.job(f"a{n}")
    found = at_once(lab.database, *(partial(claim_and_keep, node=f"node-{n}") for n in range(3)))
    won = [job_id for job_id in found if job_id is not None]
    assert len(won) == len(set(won)) == 2, "each takes one and keeps it"
    assert lab.why("a5").reason == "project lab: quota of 2 running jobs is used"
