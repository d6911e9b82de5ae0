"""Who may join the process of a session: the next that waits, of the same project and base, which no quota holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from core.db.engine import db_now
from core.db.tables import Allocation, Attempt, Event, Job, Limit
from core.jobs.base import shares
from core.jobs.base.shares import GuestSpan, UsageSpan, shared_out
from core.jobs.base.states import Status
from core.jobs.base.stop_reasons import StopReason
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.claims import Claim, Slot
from core.jobs.lifecycle.finish import Failed, Requeued, RetryPolicy, finish
from core.jobs.lifecycle.sessions import limits, records, sharing
from core.jobs.policies import nodes, usage
from core.spec.resolve import resolve
from core.spec.session.job import SessionSpec
from tests.support.lab import Lab

SLOT = Slot("cpu", "cpu")
NODE = "box"


def opened(lab: Lab, owner: str = "ada", project: str = "lab", **fields: Any) -> str:
    """A session that waits for a slot."""
    spec = SessionSpec.model_validate_json(json.dumps({"model": "team/tiny"} | fields))
    actor = lab.actor(owner, project)
    with lab.database.write() as session:
        row = records.create(session, actor, spec, resolve(spec.as_job()))
        row.job.prepared = {"model_dir": f"/models/{spec.model.id}"}  # type: ignore[union-attr]
        return row.row.id


@pytest.fixture
def host(lab: Lab) -> Claim:
    """A session that runs on the one slot of the node."""
    lab.box(NODE, [{"id": "cpu", "kind": "cpu"}])
    name = opened(lab)
    claim = lab.claim(SLOT, NODE)
    assert claim is not None and claim.token.job_id == name
    with lab.database.write() as session:
        claims.running(session, claim.token)
    return claim


def join(lab: Lab, host: Claim) -> Claim | None:
    with lab.database.write() as session:
        return sharing.join(session, host.token, host.slots, 60)


def change(lab: Lab, job_id: str, **values: Any) -> None:
    with lab.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(**values))


def test_the_next_joins_with_a_lease_and_without_a_slot(lab: Lab, host: Claim) -> None:
    first, urgent = opened(lab, "bob"), opened(lab, method={"type": "lora", "r": 64}, priority=5, idle_seconds=60)
    for name in (urgent, first):
        guest = join(lab, host)
        assert guest is not None and guest.token.job_id == name and guest.token.worker == host.token.worker
        assert guest.slots == host.slots and guest.kind == "session"
        with lab.database.write() as session:
            job = session.get_one(Job, name)
            assert job.status == Status.STARTING and host.token.job_id in job.reason and job.node == NODE
            assert claims.renew(session, guest.token, 60) == ""
            assert session.get_one(Attempt, (name, 1)).slot == "cpu"
            held = session.execute(select(Allocation.job_id).where(Allocation.released_at.is_(None))).scalars().all()
            assert held == [host.token.job_id]
            assert finish(session, guest.token, "session", Requeued("it was asked"), 0, RetryPolicy()) is Status.QUEUED
        change(lab, name, not_before=db_now() + 600)
    assert join(lab, host) is None
    with lab.database.read() as session:
        told = session.execute(select(Event.data).where(Event.job_id == first, Event.type == "status")).scalars()
        assert any("one process computes for both" in json.dumps(data) for data in told)


def test_a_guest_that_is_parked_or_closed_ends_as_one_with_a_slot(lab: Lab, host: Claim) -> None:
    for status, after in ((Status.PAUSING, Status.PAUSED), (Status.STOPPING, Status.CANCELLED)):
        name = opened(lab)
        guest = join(lab, host)
        assert guest is not None
        change(lab, name, status=status.value)
        with lab.database.write() as session:
            assert finish(session, guest.token, "session", Requeued("it was asked"), None, RetryPolicy()) is after


@pytest.mark.parametrize(
    "other",
    [
        {"project": "rivals"},
        {"model": "team/other"},
        {"quantization": "nf4"},
        {"precision": "fp32"},
        {"resources": {"max_runtime_seconds": 600}},
        {"method": {"type": "full"}},
    ],
    ids=str,
)
def test_another_project_or_base_does_not_join(lab: Lab, host: Claim, other: dict[str, Any]) -> None:
    opened(lab, **other)
    assert join(lab, host) is None
    opened(lab)
    assert join(lab, host) is not None, "one behind it does"


def test_what_keeps_all_out(lab: Lab, host: Claim) -> None:
    """A host that leaves or has failed again and again, a quota, a drained node, a lease that another worker has."""
    name = opened(lab)
    change(lab, name, machine_failures=2)
    assert join(lab, host) is None, "it may be the cause of what ends processes"
    change(lab, name, machine_failures=1)
    for values in ({"machine_failures": 2}, {"stop_requested": StopReason.PARK}, {"status": "starting"}):
        before = {"machine_failures": 0, "stop_requested": None, "status": "running"}
        change(lab, host.token.job_id, **values)
        assert join(lab, host) is None, values
        change(lab, host.token.job_id, **before)
    change(lab, host.token.job_id, attempt=9)
    assert join(lab, host) is None
    change(lab, host.token.job_id, attempt=host.token.attempt)
    actor = lab.actor("ada")
    with lab.database.write() as session:
        nodes.drain(session, actor, NODE, "a new power supply")
        session.execute(update(Job).values(stop_requested=None))
    assert join(lab, host) is None
    with lab.database.write() as session:
        nodes.undrain(session, actor, NODE)
    lab.limit("project", "lab", max_running=1)
    assert join(lab, host) is None
    with lab.database.write() as session:
        session.execute(delete(Limit))
    assert join(lab, host) is not None, "nothing else kept it out"


def test_after_a_failure_of_the_process_all_are_tried_again(lab: Lab, host: Claim) -> None:
    name = opened(lab)
    guest = join(lab, host)
    assert guest is not None
    with lab.database.write() as session:
        failed = Failed("machine", "killed", "ended by signal 9")
        policy = RetryPolicy(backoff_seconds=0)
        assert finish(session, guest.token, "session", failed, -9, policy) is Status.QUEUED
        assert session.get_one(Job, name).machine_failures == 1
    assert join(lab, host) is not None


HOUR = 3600.0


def counted(lab: Lab) -> dict[str, float]:
    """Hours of CPU slots by user, as the report has them."""
    with lab.database.read() as session:
        rows = usage.report(session, 0, 99_999)
    return {row.owner_id.removeprefix("user-"): row.cpu_hours for row in rows if row.cpu_hours}


def left(lab: Lab, claim: Claim) -> None:
    with lab.database.write() as session:
        finish(session, claim.token, "session", Requeued("it was asked"), 0, RetryPolicy())
    change(lab, claim.token.job_id, not_before=db_now() + 9 * HOUR)


def test_who_shares_a_slot_is_billed_for_a_part_of_it(lab: Lab, host: Claim) -> None:
    """The parts are those of the time that each was there, before they are charged and after; together they are the
    time of the slot."""
    lab.wait(HOUR)
    opened(lab, "bob")
    bob = join(lab, host)
    assert bob is not None
    lab.wait(HOUR)  # two
    opened(lab, "cyd")
    cyd = join(lab, host)
    assert cyd is not None
    lab.wait(HOUR)  # three
    expected = {"ada": 1 + 1 / 2 + 1 / 3, "bob": 1 / 2 + 1 / 3, "cyd": 1 / 3}
    assert counted(lab) == pytest.approx(expected, abs=0.01)
    with lab.database.read() as session:
        spans = usage.open_spans(session)
        assert {span.attempt for span in spans if span.ended is None} == {
            (one.token.job_id, one.token.attempt) for one in (host, bob, cyd)
        }
        fair = shares.effective([], spans, lab.database.now(), 1e12)
    assert sum(fair.values()) == pytest.approx(3 * HOUR * SLOT.billing, rel=0.01)
    lab.limit("owner", "bob", session_hours_week=0.8)
    actor = lab.actor("bob")
    with lab.database.write() as session, pytest.raises(limits.SessionQuota, match=r"0\.8 in seven days"):
        limits.check_sessions(session, actor, 0)
    left(lab, bob)
    lab.wait(HOUR)  # two
    expected = {"ada": expected["ada"] + 1 / 2, "bob": expected["bob"], "cyd": expected["cyd"] + 1 / 2}
    assert counted(lab) == pytest.approx(expected, abs=0.01)
    left(lab, host)  # before its last guest, as a worker that is gone
    lab.wait(HOUR)
    assert counted(lab) == pytest.approx(expected, abs=0.01)
    with lab.database.write() as session:
        assert usage.charge(session) == 1
    assert counted(lab) == pytest.approx(expected, abs=0.01)
    left(lab, cyd)
    assert counted(lab) == pytest.approx(expected, abs=0.01)
    assert sum(counted(lab).values()) == pytest.approx(4, abs=0.01)


@pytest.mark.parametrize("ended", [None, 100.0])
def test_parts_of_a_span_sum_up_to_it(ended: float | None) -> None:
    """Guests that were there at once, one that came before the slot was held, and one that left behind it."""
    whole = UsageSpan("a", "p", 10.0, ended, 0.1, 0, ("host", 1))
    guests = [
        GuestSpan("b", "p", ("g", 1), 5.0, 30.0),
        GuestSpan("c", "p", ("h", 1), 20.0, None),
        GuestSpan("d", "p", ("i", 1), 20.0, 20.0),
        GuestSpan("e", "p", ("j", 1), 40.0, None if ended is None else 200.0),
    ]
    found = [replace(one, ended=150.0 if one.ended is None else one.ended) for one in shared_out(whole, guests)]
    told = {one.owner_id: 0.0 for one in found}
    for one in found:
        assert one.ended is not None and one.ended > one.began >= 10.0
        told[one.owner_id] += one.part * (one.ended - one.began)
    end = 150.0 if ended is None else ended
    assert sum(told.values()) == pytest.approx(end - 10.0)
    assert told == pytest.approx({
        "a": 10 / 2 + 10 / 3 + 10 / 2 + (end - 40) / 3, "b": 10 / 2 + 10 / 3,
        "c": 10 / 3 + 10 / 2 + (end - 40) / 3, "e": (end - 40) / 3,
    })  # fmt: skip
