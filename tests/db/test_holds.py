"""People on the box: holds, drained GPUs, maintenance; and what a waiting job says of each, in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from core.db.engine import Database, db_now
from core.db.tables import Attempt, Audit, Hold, Job, Node, OutboxMessage
from core.errors import Conflict, EftError, Forbidden, NotFound
from core.jobs.base.slots import Needs, Slot
from core.jobs.base.stop_reasons import StopReason
from core.jobs.lifecycle import claims
from core.jobs.lifecycle.finish import Requeued, RetryPolicy, finish
from core.jobs.lifecycle.submit import Actor
from core.jobs.policies import holds, maintenance
from core.jobs.scheduling import cluster
from core.jobs.views.explain import QueueSettings, duration, ordinal
from tests.support.lab import QUEUE_SETTINGS, Lab, gpu

ADA = Actor("user-ada", "proj-lab", "req-1")
HOUR = 3600.0
FIRST = Slot("GPU-0", "gpu", "amd", "gfx942", 192 << 30)
SECOND = Slot("GPU-1", "gpu", "amd", "gfx942", 192 << 30)


@pytest.fixture
def lab(database: Database) -> Lab:
    """A box with two GPUs."""
    found = Lab(database)
    found.actor("ada")
    found.actor("bob", "thesis")
    found.box("box-1", [gpu(0), gpu(1)])
    return found


def hold(lab: Lab, *names: str, actor: Actor = ADA, seconds: float | None = HOUR, **more: Any) -> list[holds.NamedHold]:
    until = None if seconds is None else lab.database.now() + seconds
    with lab.database.write() as session:
        return holds.hold(session, actor, names, held_for="bob", why="notebook", until=until, **more)


def release(lab: Lab, *names: str, actor: Actor = ADA, **more: Any) -> list[holds.NamedHold]:
    with lab.database.write() as session:
        return holds.release(session, actor, names, **more)


def seat(lab: Lab, label: str) -> cluster.SlotState:
    with lab.database.read() as session:
        (found,) = [one for one in cluster.slot_states(session, lab.database.now(), 600) if one.label == label]
    return found


# -- holds


def test_a_held_gpu_is_not_claimed_until_it_is_over(lab: Lab) -> None:
    lab.job("a")
    hold(lab, "box-1/0", seconds=600)
    assert lab.claim(FIRST, "box-1") is None
    told = lab.why("a")
    assert re.fullmatch(
        r"1st in line; 1 of 2 free \(box-1/0 held until .* UTC for bob \(notebook\)\); needs 1 slot", told.reason
    ), told.reason
    with lab.database.write() as session:
        session.execute(update(Hold).values(until=db_now() - 0.01))
    assert seat(lab, "box-1/0").state == "free"
    assert lab.claim(FIRST, "box-1") is not None


def test_all_or_none_and_who_may_end_it(lab: Lab) -> None:
    bob = lab.actor("bob")
    hold(lab, "1")
    with pytest.raises(Conflict, match=r"box-1/1 is held already for bob.*eft gpu release box-1/1"):
        hold(lab, "box-1/0", "box-1/GPU-1")
    assert seat(lab, "box-1/0").free
    with pytest.raises(Conflict, match="held by ada") as refused:
        release(lab, "1", actor=bob)
    assert refused.value.code == "held_by_another"
    lab.job("a")
    (done,) = release(lab, "1", actor=bob, anybodys=True)
    assert done.hold.released_at is not None
    with pytest.raises(Conflict, match="not held"):
        release(lab, "1")
    with lab.database.read() as session:
        told = session.execute(select(Audit.action, Audit.target, Audit.actor_id).order_by(Audit.id)).all()
        assert session.execute(select(OutboxMessage.id).where(OutboxMessage.job_id == lab.ids["a"])).all()
        spans = cluster.history(session, "box-1", "GPU-1", 10)
        data = session.execute(select(Audit.data).where(Audit.action == "gpu.hold")).scalars().first()
    assert data is not None and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", data["until"]), "a time, for people"
    assert ("gpu.hold", "box-1/1", "user-ada") in told and ("gpu.release", "box-1/1", "user-bob") in told
    assert [(span.what, span.user, span.why) for span in spans] == [("hold", "ada", "for bob notebook")]


def test_names_of_gpus(lab: Lab) -> None:
    lab.box("box-2", [gpu(0), {"id": "cpu-1", "kind": "cpu"}])
    with pytest.raises(Conflict, match="box-1/0, box-2/0"):
        hold(lab, "0")
    with pytest.raises(NotFound, match="there are: box-1/0, box-1/1, box-2/0, box-2/cpu-1"):
        hold(lab, "box-3/0")
    assert {one.hold.slot for one in hold(lab, "cpu-1", "box-2/GPU-0", "box-2/0")} == {"cpu-1", "GPU-0"}
    with pytest.raises(EftError, match="in the past"):
        hold(lab, "box-1/0", seconds=-5.0)


def test_a_members_holds_have_an_end_and_are_few(lab: Lab) -> None:
    few, bob = holds.HoldLimits(seconds=HOUR, slots=1), lab.actor("bob", "thesis")
    with pytest.raises(EftError, match=r"at most 1 hours here \(EFT_HOLD_HOURS\), until [-\d ]*\d\d:\d\d UTC") as late:
        hold(lab, "box-1/0", seconds=2 * HOUR, bounds=few)
    assert late.value.code == "bad_time"
    (held,) = hold(lab, "box-1/0", seconds=None, bounds=few)
    assert held.hold.until == pytest.approx(held.hold.created_at + HOUR, abs=60)
    with pytest.raises(holds.TooManyHolds, match=r"1 GPU at once \(EFT_HOLD_SLOTS\), and these would be 2"):
        hold(lab, "box-1/1", bounds=few)
    hold(lab, "box-1/1", actor=bob, bounds=few)  # everybody has their own
    lab.wait(0)
    release(lab, "box-1/0")
    release(lab, "box-1/1", actor=bob)
    with pytest.raises(holds.TooManyHolds, match="would be 2"):
        hold(lab, "box-1/0", "box-1/1", bounds=few)
    with pytest.raises(EftError, match="only admins of the box hold GPUs here") as refused:
        hold(lab, "box-1/0", bounds=holds.HoldLimits(HOUR, 0))
    assert refused.value.status == 403
    assert len(hold(lab, "box-1/0", "box-1/1", seconds=None)) == 2, "an admin of the box: any number, without an end"


def test_on_a_busy_gpu_it_counts_from_the_end_of_the_job_on_or_from_now(lab: Lab) -> None:
    lab.job("a")
    lab.job("b")
    mine, also = lab.claim(FIRST, "box-1"), lab.claim(SECOND, "box-1")
    assert mine is not None and also is not None
    hold(lab, "box-1/0")
    with lab.database.read() as session:
        assert claims.stop_requested(session, mine.token) == "", "it works on"
    assert seat(lab, "box-1/0").busy == lab.ids["a"]
    hold(lab, "box-1/1", now=True)
    with lab.database.read() as session:
        assert claims.stop_requested(session, also.token) == StopReason.HOLD
    with lab.database.write() as session:
        finish(session, also.token, "train", Requeued("slot GPU-1 of box-1 is held"), 75, RetryPolicy())
    assert lab.claim(SECOND, "box-1") is None
    told = lab.why("b")
    assert told.code == "closed" and "0 of 2 free" in told.reason and told.estimated_start is not None
    assert told.estimated_start == pytest.approx(lab.database.now() + HOUR, abs=60), "when the hold is over"


def test_another_projects_job_leaves_only_for_an_admin_of_the_box(lab: Lab) -> None:
    lab.job("theirs", "bob", "thesis")
    claim = lab.claim(FIRST, "box-1")
    assert claim is not None
    with pytest.raises(Forbidden, match="another project"):
        hold(lab, "box-1/0", now=True)
    with lab.database.read() as session:
        assert session.execute(select(Hold)).all() == [], "neither is it held"
    hold(lab, "box-1/0", now=True, others_jobs=True, kind="drain")
    with lab.database.read() as session:
        assert claims.stop_requested(session, claim.token) == StopReason.HOLD


# -- maintenance


def plan(lab: Lab, start: float, end: float, node: str | None = "box-1") -> str:
    with lab.database.write() as session:
        now = lab.database.now() if not lab.database.is_sqlite else session.execute(select(db_now())).scalar_one()
        return maintenance.plan(session, ADA, node, now + start, now + end, "new fans").id


def test_what_would_reach_into_maintenance_is_not_started(lab: Lab) -> None:
    plan(lab, 2 * HOUR, 3 * HOUR)
    lab.job("long", limit=int(4 * HOUR), age=30.0)
    lab.job("short", limit=int(HOUR), age=20.0)
    lab.job("open", age=10.0)
    told = lab.why("long")
    assert (told.code, told.position) == ("maintenance", None)
    assert re.fullmatch(r"its time limit \(4 h\) reaches into the maintenance of box-1 at .* UTC", told.reason)
    assert lab.order_by_explanation() == ["short", "open"]
    names = []
    for slot in (FIRST, SECOND):
        claim = lab.claim(slot, "box-1")
        assert claim is not None
        names.append(lab.name(claim.token.job_id))
    assert names == ["short", "open"]
    elsewhere = lab.claim(FIRST, "box-2")
    assert elsewhere is not None and lab.name(elsewhere.token.job_id) == "long", "only there"


def test_a_job_that_has_run_before_has_only_the_rest_of_its_time(lab: Lab) -> None:
    lab.job("a", limit=int(2 * HOUR))
    claim = lab.claim(FIRST, "box-1")
    assert claim is not None
    with lab.database.write() as session:
        session.execute(update(Attempt).values(started_at=Attempt.started_at - 1.5 * HOUR))
        finish(session, claim.token, "train", Requeued("a test"), 75, RetryPolicy())
    plan(lab, HOUR, 3 * HOUR)
    assert lab.claim(FIRST, "box-1") is not None


def test_when_it_begins_everybody_leaves_and_nobody_comes(lab: Lab) -> None:
    lab.job("a")
    claim = lab.claim(FIRST, "box-1")
    assert claim is not None
    with lab.database.read() as session:
        assert not maintenance.begins(session)
    number = plan(lab, -1.0, HOUR, None)
    with lab.database.write() as session:
        assert maintenance.begins(session) and maintenance.begin(session) == 1
    with lab.database.write() as session:
        assert maintenance.begin(session) == 0, "asked once"
        assert claims.stop_requested(session, claim.token) == StopReason.MAINTENANCE
    lab.job("b")
    assert lab.claim(SECOND, "box-1") is None
    told = lab.why("b")
    assert told.code == "closed" and "maintenance until" in told.reason and "new fans" in told.reason
    with lab.database.write() as session:
        maintenance.cancel(session, ADA, number)
    assert lab.claim(SECOND, "box-1") is not None
    with pytest.raises(EftError, match="ends after it begins"):
        plan(lab, HOUR, HOUR)


# -- the words of everything else

Setup = Callable[[Lab], Any]
WORDS: dict[str, tuple[Setup, str, str]] = {
    "its turn": (lambda lab: lab.job("a"), "turn", r"1st in line; 2 of 2 free; needs 1 slot"),
    "others first": (
        lambda lab: [lab.job("x", priority=2), lab.job("y", priority=1), lab.job("a", requirements={"bf16": True})],
        "turn",
        r"3rd in line; 2 of 2 free; needs 1 slot with bf16",
    ),
    "its model": (
        lambda lab: [lab.job("x", prepared=False), lab.job("a", prepared=False)],
        "model",
        r"waits for a worker to prepare its model; 2nd in line",
    ),
    "a GPU that is not there": (
        lambda lab: lab.job("a", requirements={"min_memory_gb": 300, "vendor": "nvidia", "arch": ["sm_90"]}),
        "requirements",
        r"needs 1 NVIDIA GPU with 300 GB and sm_90; none of the 2 slots here has it "
        r"\(box-1/0 lacks 300 GB and NVIDIA and sm_90\)",
    ),
    "a label": (
        lambda lab: lab.job("a", accelerator="gpu", requirements={"labels": ["fast"]}),
        "requirements",
        r"needs 1 GPU with label fast; none of the 2 slots here has it \(box-1/0 lacks label fast\)",
    ),
    "a quota": (
        lambda lab: [lab.limit("project", "lab", max_running=0), lab.job("a")],
        "quota",
        r"project lab: quota of 0 running jobs is used",
    ),
    "GPU hours": (
        lambda lab: [lab.limit("owner", "ada", gpu_hours_week=0), lab.job("a")],
        "quota",
        r"owner ada: quota of 0 GPU hours a week is used \(0\.0 in seven days\)",
    ),
    "a quota of queued jobs": (
        lambda lab: [lab.limit("project", "lab", max_queued=1), lab.job("x"), lab.job("a")],
        "quota",
        r"project lab: quota of 1 queued job is used; older ones or higher priorities go first; 2nd in line",
    ),
    "a quota that others will have used up": (
        lambda lab: [lab.limit("project", "lab", max_running=2), *(lab.job(name) for name in ("x", "y", "a"))],
        "quota",
        r"project lab: quota of 2 running jobs is used once those before it have started",
    ),
    "its time": (
        lambda lab: [lab.job("a"), _later(lab)],
        "later",
        r"retried after a fault; next retry at .* UTC",
    ),
    "no worker": (
        lambda lab: [lab.job("a"), _silence(lab)],
        "no_worker",
        r"no worker is running.*",
    ),
    "drained": (
        lambda lab: [lab.job("a"), _drain(lab)],
        "closed",
        r"1st in line; 0 of 2 free \(box-1/0 the node is drained \(a new fan\); .*\); needs 1 slot",
    ),
    "somebody's own process": (
        lambda lab: [lab.job("a"), _outside(lab)],
        "turn",
        r"1st in line; 1 of 2 free \(box-1/0 used by bob, outside eft \(pid 4711, python\)\); needs 1 slot",
    ),
}


def _later(lab: Lab) -> None:
    with lab.database.write() as session:
        session.execute(update(Job).values(not_before=db_now() + 60, reason="retried after a fault"))


def _silence(lab: Lab) -> None:
    with lab.database.write() as session:
        session.execute(update(Node).values(heartbeat_at=db_now() - 3600))


def _drain(lab: Lab) -> None:
    with lab.database.write() as session:
        session.execute(update(Node).values(drained_at=db_now(), drain_reason="a new fan"))


def _outside(lab: Lab) -> None:
    process = {"pid": 4711, "user": "bob", "name": "python", "bytes": 1 << 30}
    lab.box("box-1", [{**gpu(0), "processes": [process]}, gpu(1)])


@pytest.mark.parametrize("case", WORDS)
def test_why_it_waits(lab: Lab, case: str) -> None:
    setup, code, words = WORDS[case]
    setup(lab)
    told = lab.why("a")
    assert (told.code, bool(re.fullmatch(words, told.reason))) == (code, True), told.reason
    listed = {lab.name(one.job.id): one for one in lab.explained()}
    assert (listed["a"].code, listed["a"].reason) == (told.code, told.reason), "the queue says what the job says"


def test_room_on_the_disk(lab: Lab) -> None:
    lab.job("a")
    told = lab.why("a", QueueSettings(free=100 << 20, reserve=200 << 20, silent_after=600.0))
    assert (told.code, told.position) == ("disk", None)
    assert told.reason.startswith("waits for room on the data root: 100 MiB free, needs 200")


def test_estimates_from_steps_and_limits(lab: Lab) -> None:
    """GPU-0 has 100 steps left at a second each; GPU-1 a time limit of an hour, just begun; three wait with limits."""
    lab.job("steps", age=90.0)
    lab.job("limited", limit=int(HOUR), age=80.0)
    for slot in (FIRST, SECOND):
        assert lab.claim(slot, "box-1") is not None
    with lab.database.write() as session:
        progress = {"step": 50, "total_steps": 150, "seconds_left": 100.0}
        session.execute(update(Job).where(Job.id == lab.ids["steps"]).values(progress=progress))
    for number in range(3):
        lab.job(f"w{number}", limit=600, age=70.0 - number)
    now = lab.database.now()
    starts = [(lab.why(f"w{number}").estimated_start or 0) - now for number in range(3)]
    assert starts == pytest.approx([100, 700, 1300], abs=15)
    listed = {lab.name(one.job.id): one.estimated_start for one in lab.explained()}
    assert [(listed[f"w{n}"] or 0) - now for n in range(3)] == pytest.approx(starts, abs=15)
    on = {lab.name(one.job.id): one.estimated_gpus for one in lab.explained()}
    assert [on[f"w{n}"] for n in range(3)] == [("box-1/0",)] * 3, "the limited one has an hour to go"


def test_small_words() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 112)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th",
    ]  # fmt: skip
    assert [duration(s) for s in (45, 600, 7200, 5.5 * HOUR)] == ["45 s", "10 min", "2 h", "5.5 h"]
    assert Needs("gpu", 40_000, True).words() == "1 GPU with bf16 and 40 GB"
    assert Needs("any").words() == "1 slot" and Needs("cpu").words() == "1 CPU slot"
    assert QUEUE_SETTINGS.room is None
