"""Jobs of several slots: all of them or none, kept for the head of the line, and who may go ahead meanwhile."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from core.db import migrate
from core.db.engine import Database, db_now
from core.db.tables import Allocation, Event, Job, Node, OutboxMessage
from core.jobs.base.shares import SLICE_SECONDS
from core.jobs.base.slots import Key, Needs
from core.jobs.lifecycle import changes, lease_expiry, submit
from core.jobs.lifecycle.claims import Claim
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, finish
from core.jobs.lifecycle.lease_expiry import LossPolicy
from core.jobs.policies import holds, maintenance, usage
from tests.support.at_once import at_once
from tests.support.contender import contend_for_gangs
from tests.support.lab import GPU, Lab, gpu

HOUR = 3600


def four(lab: Lab, name: str = "box-1", **facts: Any) -> None:
    lab.box(name, [gpu(n, uuid=f"{name}-{n}", **facts) for n in range(4)])


def won(claim: Claim | None) -> Claim:
    assert claim is not None
    return claim


def slots(claim: Claim | None) -> list[str]:
    return [slot.id for slot in won(claim).slots]


def names(lab: Lab, node: str = "box-1") -> list[str]:
    """Claim until nothing more starts there."""
    found = []
    while (claim := lab.turn(node)) is not None:
        found.append(lab.name(claim.token.job_id))
    return found


def test_all_of_them_in_one_transaction_and_back_together(lab: Lab) -> None:
    four(lab)
    lab.job("one")
    lab.job("gang", gpus=3)
    assert slots(lab.turn("box-1")) == ["GPU-0"]
    claim = won(lab.turn("box-1"))
    assert ([slot.id for slot in claim.slots], claim.slot.id) == (["GPU-1", "GPU-2", "GPU-3"], "GPU-1")
    with lab.database.read() as session:
        mine = select(Allocation).where(Allocation.job_id == lab.ids["gang"])
        rows = session.execute(mine.order_by(Allocation.slot)).scalars().all()
        assert [(row.slot, row.gpus, row.billing, row.attempt) for row in rows] == [
            (f"GPU-{n}", 1, 1.0, 1) for n in (1, 2, 3)
        ]
        told = session.execute(select(Event.data).where(Event.job_id == lab.ids["gang"], Event.seq == 2)).scalar_one()
        assert (told["slots"], told["reason"]) == (
            ["GPU-1", "GPU-2", "GPU-3"],
            "starts on box-1, slots GPU-1, GPU-2, GPU-3",
        )
        spans = usage.open_spans(session)
        counted = usage.effective(usage.booked(session), spans, lab.database.now(), 1e9)
        assert counted["user-ada"] == 4 * SLICE_SECONDS, "every GPU counts"
        rung = session.execute(select(func.count()).select_from(OutboxMessage)).scalar_one()
    lab.end(claim, HOUR)
    with lab.database.read() as session:
        held = select(Allocation.slot).where(Allocation.released_at.is_(None))
        assert session.execute(held).scalars().all() == ["GPU-0"]
        assert session.execute(select(func.count()).select_from(OutboxMessage)).scalar_one() == rung + 2
        rows = usage.report(session, 0, 99_999)
    assert sum(row.gpu_hours for row in rows) == pytest.approx(3, abs=0.01)
    assert [row.running for row in rows] == [1]


def test_a_quota_counts_jobs_and_gpu_hours(lab: Lab) -> None:
    four(lab)
    lab.limit("project", "lab", max_running=2, gpu_hours_week=3.0)
    lab.job("gang", gpus=3)
    lab.job("b")
    lab.job("c")
    assert names(lab) == ["gang", "b"]
    assert "quota of 2 running jobs" in lab.why("c").reason
    lab.wait(HOUR)  # three GPUs for an hour, and one
    with lab.database.write() as session:
        session.execute(text("UPDATE limits SET max_running = NULL"))
    assert "quota of 3 GPU hours a week is used (4.0 in" in lab.why("c").reason


def test_members_have_each_what_is_asked_for_and_are_alike(lab: Lab) -> None:
    lab.box(
        "mixed",
        [
            gpu(0, arch="gfx90a"),
            gpu(1, memory_bytes=64 << 30),
            gpu(2),
            gpu(3, arch="gfx90a"),
            gpu(4, vendor="nvidia", arch="sm_90"),
            gpu(5),
        ],
        ["fast"],
    )
    lab.job("large", gpus=2, requirements={"min_memory_gb": 100.0, "arch": ["gfx942", "sm_90"], "labels": ["fast"]})
    assert slots(lab.turn("mixed")) == ["GPU-2", "GPU-5"]
    lab.job("alike", gpus=2)
    assert slots(lab.turn("mixed")) == ["GPU-0", "GPU-3"]
    lab.job("theirs", gpus=2, requirements={"vendor": "nvidia"})
    lab.job("three", gpus=3)
    assert lab.turn("mixed") is None, "GPU-1 and GPU-4 are of two makers"
    told = lab.why("theirs")
    assert (told.code, told.position) == ("requirements", None)
    assert told.reason == "needs 2 NVIDIA GPUs of one node; the most that one has is 1 (mixed)"
    assert lab.why("three").reason.startswith("1st in line; 1 of 3 free"), "the AMD ones of one architecture"


def test_what_nobody_may_have_is_no_member(lab: Lab) -> None:
    """Held, drained, in quarantine, used by somebody beside eft: of four, two are left."""
    process = {"pid": 4711, "user": "bob", "name": "python", "bytes": 1 << 30}
    lab.box("box-1", [gpu(0), {**gpu(1), "processes": [process]}, {**gpu(2), "quarantined": "hot"}, gpu(3), gpu(4)])
    actor = lab.actor("ada")
    with lab.database.write() as session:
        holds.hold(session, actor, ["box-1/0"], held_for="bob", why="notebook")
    lab.job("three", gpus=3)
    lab.job("two", gpus=2)
    assert slots(lab.turn("box-1")) == ["GPU-3", "GPU-4"], (
        "where three can come together at no known time, nothing is kept"
    )
    told = lab.why("three")
    assert (told.code, told.position) == ("closed", 1)
    assert told.reason.startswith("1st in line; 0 of 5 free (box-1/0 held for bob (notebook); box-1/1 used by bob")
    with lab.database.write() as session:
        session.execute(update(Node).values(drained_at=db_now()))
    lab.job("again", gpus=2)
    assert lab.turn("box-1") is None


def test_slots_are_kept_for_the_head_of_the_line_and_gaps_filled(lab: Lab) -> None:
    four(lab)
    lab.job("long", gpus=2, age=99.0)
    won(lab.turn("box-1"))
    lab.tell("long", 1000.0)
    lab.job("wide", gpus=4, limit=500, age=90.0)
    lab.job("open", age=80.0)
    lab.job("slow", limit=1100, age=70.0)
    lab.job("quick", limit=900, age=60.0)
    lab.job("pair", gpus=2, limit=800, age=50.0)
    assert (
        lab.why("wide").reason == "1st in line; 2 of 4 free (box-1/2 kept for it; box-1/3 kept for it); needs 4 slots"
    )
    assert lab.why("open").reason.startswith("2nd in line; 2 of 4 free (box-1/2 kept until ")
    assert [lab.why(name).position for name in ("wide", "open", "slow", "quick", "pair")] == [1, 2, 3, 4, 5]
    now = lab.database.now()
    starts = {name: (lab.why(name).estimated_start or 0) - now for name in ("wide", "quick", "pair")}
    assert starts == pytest.approx({"wide": 1000, "quick": 0, "pair": 1500}, abs=15)
    assert names(lab) == ["quick"], "neither who may stay nor who is too slow, and one slot is no pair"
    with lab.database.read() as session:
        row = session.get_one(Job, lab.ids["wide"])
        assert row.reserved_node == "box-1" and row.reserved_at is not None
    lab.wait(1000)
    lab.end(lab.held["quick"], 0)
    lab.end(lab.held["long"], 0)
    assert names(lab) == ["wide"]
    with lab.database.read() as session:
        assert session.get_one(Job, lab.ids["wide"]).reserved_node is None


def test_where_nobody_knows_the_end_nothing_goes_ahead(lab: Lab) -> None:
    """A trainer that has told no pace yet, or may stop early, may leave at any moment: whoever went ahead would be in
    the way then."""
    lab.box("box-1", [gpu(0), gpu(1)])
    lab.job("runs", limit=HOUR, age=99.0)
    won(lab.turn("box-1"))
    lab.job("wide", gpus=2, age=90.0)
    lab.job("quick", limit=60)
    assert lab.turn("box-1") is None
    lab.tell("runs", 2000.0)
    stopping = {"type": "held_out", "early_stopping": {"type": "patience"}}
    with lab.database.write() as session:
        row = session.get_one(Job, lab.ids["runs"])
        row.spec = {**row.spec, "evaluation": stopping}
    assert lab.turn("box-1") is None
    with lab.database.write() as session:
        row = session.get_one(Job, lab.ids["runs"])
        row.spec = {**row.spec, "evaluation": {"type": "none"}}
    assert names(lab) == ["quick"]


def test_who_has_slots_kept_stays_first_among_equals(lab: Lab) -> None:
    """What goes ahead is charged to the same owner, and others have used nothing; a higher priority goes first."""
    lab.box("box-1", [gpu(0), gpu(1)])
    lab.job("runs", "cyd", age=99.0)
    won(lab.turn("box-1"))
    lab.tell("runs", 3000.0)
    lab.job("wide", "ada", gpus=2, age=90.0)
    lab.job("ahead", "ada", limit=1000, age=80.0)
    assert names(lab) == ["ahead"]
    lab.job("fresh", "dan", limit=1000)
    assert lab.order_by_explanation() == ["wide", "fresh"]
    lab.end(lab.held["ahead"], 1000)
    assert lab.order_by_explanation() == ["wide", "fresh"]
    lab.job("urgent", "dan", priority=1)
    assert names(lab) == ["urgent"]


def test_nothing_goes_ahead_that_uses_up_its_quota(lab: Lab) -> None:
    lab.box("box-1", [gpu(0), gpu(1)])
    lab.limit("project", "lab", gpu_hours_week=100.0)
    lab.job("runs", "cyd", "other", age=99.0)
    won(lab.turn("box-1"))
    lab.tell("runs", 9000.0)
    lab.job("wide", "ada", gpus=2, age=90.0)
    lab.job("same project", "bob", limit=60, age=80.0)
    assert lab.turn("box-1") is None
    lab.job("other project", "bob", "other", limit=60)
    assert names(lab) == ["other project"]


def test_what_no_node_can_ever_hold_is_told_and_is_in_nobodys_way(lab: Lab) -> None:
    four(lab)
    four(lab, "box-2")
    lab.job("eight", gpus=8, accelerator="gpu", age=99.0)
    lab.job("one")
    told = lab.why("eight")
    assert (told.code, told.position, told.estimated_start) == ("requirements", None, None)
    assert told.reason == "needs 8 GPUs of one node; the most that one has is 4 (box-1)"
    assert names(lab) == ["one"]


def test_the_node_where_they_come_together_soonest(lab: Lab) -> None:
    for name in ("box-1", "box-2"):
        lab.box(name, [gpu(0), gpu(1)])
    for name, left in (("a", 5000.0), ("b", 300.0)):
        lab.job(name, age=99.0)
        won(lab.turn("box-1" if name == "a" else "box-2"))
        lab.tell(name, left)
    lab.job("wide", gpus=2, age=90.0)
    lab.job("single")
    assert lab.turn("box-2") is None, "kept there"
    assert names(lab, "box-1") == ["single"], "and not here"
    assert lab.why("wide").reason == "1st in line; 1 of 2 free on box-2 (box-2/1 kept for it); needs 2 slots"
    assert (lab.why("wide").estimated_start or 0) - lab.database.now() == pytest.approx(300, abs=15)


def test_lost_and_handed_back_as_one(lab: Lab) -> None:
    four(lab)
    lab.job("gang", gpus=4)
    claim = won(lab.turn("box-1"))
    with lab.database.write() as session:
        session.execute(update(Job).values(lease_until=db_now() - 1))
    with lab.database.write() as session:
        assert lease_expiry.reap(session, LossPolicy()) == [(claim.token.job_id, 1)]
    with lab.database.write() as session:
        assert finish(session, claim.token, "train", Requeued("late"), 75, RetryPolicy()) is None, "fenced"
    assert slots(lab.turn("box-1")) == [f"GPU-{n}" for n in range(4)]


def test_a_bound_is_its_limit_less_what_it_used_or_its_own_pace(lab: Lab) -> None:
    lab.box("box-1", [gpu(0)])
    lab.job("limited", limit=1000)
    lab.job("free")
    for name, left, bound in (("limited", 5000.0, 600.0), ("free", 400.0, 800.0)):
        claim = won(lab.turn("box-1"))
        lab.tell(name, left)
        lab.wait(400)
        with lab.database.write() as session:
            finish(session, claim.token, "train", Requeued("drained"), 75, RetryPolicy())
        with lab.database.write() as session:
            row = session.get_one(Job, lab.ids[name])
            assert row.bound_seconds == pytest.approx(bound, abs=5)
            row.status = "paused"  # out of the way
    lab.job("killed")
    claim = won(lab.turn("box-1"))
    lab.tell("killed", 400.0)
    with lab.database.write() as session:
        finish(session, claim.token, "train", Requeued("drained"), -9, RetryPolicy())
        assert session.get_one(Job, lab.ids["killed"]).bound_seconds is None, "its checkpoint may be an old one"


def test_who_is_paused_or_gets_another_priority_comes_back_without_the_slots_that_were_kept(lab: Lab) -> None:
    lab.box("box-1", [gpu(0), gpu(1)])
    lab.job("runs", "cyd", age=99.0)
    won(lab.turn("box-1"))
    lab.tell("runs", 3000.0)
    lab.used("ada", 1000.0)
    ada = lab.actor("ada")
    for name in ("paused", "lowered"):
        lab.job(name, gpus=2, priority=int(name == "lowered"), age=90.0)
        assert lab.turn("box-1") is None
        with lab.database.write() as session:
            assert session.get_one(Job, lab.ids[name]).reserved_at is not None
            if name == "paused":
                submit.pause(session, ada, lab.ids[name])
                submit.resume(session, ada, lab.ids[name])
            else:
                changes.prioritise(session, ada, lab.ids[name], 0)
            assert session.get_one(Job, lab.ids[name]).reserved_at is None
    lab.job("fresh", "bob", gpus=2, limit=100)
    assert lab.order_by_explanation()[0] == "fresh", "whoever has used less goes first again"


def test_nothing_is_kept_that_comes_together_in_a_maintenance(lab: Lab) -> None:
    lab.box("box-1", [gpu(0), gpu(1)])
    lab.job("runs", age=99.0)
    won(lab.turn("box-1"))
    lab.tell("runs", 3000.0)
    lab.job("wide", gpus=2, age=90.0)
    ada, now = lab.actor("ada"), lab.database.now()
    with lab.database.write() as session:
        maintenance.plan(session, ada, "box-1", now + 1000, now + 9000, "fans")
    lab.job("open", "bob")
    assert names(lab) == ["open"], "a slot that nobody could use before then"


def test_keys_and_words_of_several() -> None:
    needs = Needs("gpu", 40_000, True, gpus=2)
    assert needs.words() == "2 GPUs with bf16 and 40 GB"
    assert Needs("any", gpus=4).words() == "4 slots" and Needs("cpu", gpus=2).words() == "2 CPU slots"
    key = Key(needs, "p", "u", 3)
    assert Key.parse(str(key)) == key and str(key).startswith("2*gpu mb=40000")
    assert needs.width("prepare") == 1 and needs.width("train") == 2


def test_the_way_back_has_one_row_an_attempt(empty_url: str) -> None:
    database = Database(empty_url)
    migrate.upgrade(database, "0008")
    with database.write() as session:
        session.execute(text("INSERT INTO users (id, name, created_at, box_admin) VALUES ('u', 'u', 1.0, false)"))
        session.execute(text("INSERT INTO projects (id, name, created_at) VALUES ('p', 'p', 1.0)"))
        columns = "id, kind, spec, accelerator, priority, queue_key, resume_from, status, reason, attempt"
        zeros = "machine_failures, losses, full_disks, furthest_step, event_seq, created_at, owner_id, project_id"
        session.execute(
            text(
                f"INSERT INTO jobs ({columns}, {zeros}) VALUES ('j', 'train', '{{}}', 'any', 0, 'k', '[]', 'running', "
                "'', 1, 0, 0, 0, 0, 0, 1.0, 'u', 'p')"
            )
        )
        for slot in ("GPU-1", "GPU-0", "GPU-2"):
            session.execute(
                text(
                    "INSERT INTO allocations (job_id, attempt, node, slot, created_at, gpus, billing, owner_id, "
                    "project_id) VALUES ('j', 1, 'n', :slot, 1.0, 1, 1.0, 'u', 'p')"
                ),
                {"slot": slot},
            )
    migrate.downgrade(database, "0007")
    with database.read() as session:
        assert session.execute(text("SELECT slot, gpus, billing FROM allocations")).all() == [("GPU-0", 3, 3.0)]
    database.dispose()


def test_contenders_in_processes_never_take_a_slot_twice(lab: Lab) -> None:
    """Two claim at once for the same node of four slots: gangs of one to four, kept and given back."""
    four(lab)
    made = Counter(number % 4 + 1 for number in range(8))
    for number in range(8):
        lab.job(f"j{number}", "ada" if number % 2 else "bob", gpus=number % 4 + 1)
    won_by = at_once(lab.database, *[partial(contend_for_gangs, node="box-1")] * 2)
    claims = [claim for claimed in won_by for claim in claimed]
    assert {job_id for job_id, _ in claims} == set(lab.ids.values())
    assert Counter(width for _, width in claims) == made, "every job ran once, with as many slots as it needs"
    with lab.database.read() as session:
        rows = session.execute(select(Allocation.slot, Allocation.created_at, Allocation.released_at)).all()
    assert GPU["arch"] == "gfx942" and len(rows) == sum(size * count for size, count in made.items())
    for slot in {row.slot for row in rows}:
        spans = sorted((row.created_at, row.released_at) for row in rows if row.slot == slot)
        assert all(before[1] <= after[0] for before, after in pairwise(spans)), slot
