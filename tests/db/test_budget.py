"""Budgets of the data root: what goes first, and what waits when nothing more may go. Real rows, real folders."""

from __future__ import annotations

import pytest
from sqlalchemy import insert, select, update

from core.db.engine import db_now
from core.db.tables import Event, File, Job, Metric
from core.jobs.base.slots import Slot
from core.jobs.lifecycle import claims, retention
from core.jobs.lifecycle.finish import RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.retention import RetentionRules
from core.jobs.policies import budget
from core.jobs.policies.budget import Budget, Over
from core.jobs.views import explain
from core.settings import Settings
from core.storage.layout import Layout
from tests.support.lab import Lab
from worker.upkeep import reclaim
from worker.upkeep.disk_room import Room, room_on

pytestmark = pytest.mark.one_database

MB = 1_000_000
CPU = Slot("cpu", "cpu")


def settings(layout: Layout, **more: object) -> Settings:
    return Settings(data=str(layout.root), min_free_bytes=0, **more)


def ended(lab: Lab, layout: Layout, name: str, hours_ago: float, checkpoint: int) -> str:
    """A job that succeeded, with a checkpoint of so many bytes."""
    job_id = lab.job(name)
    claim = lab.claim()
    assert claim is not None and claim.token.job_id == job_id
    folder = layout.attempt(job_id, 1)
    for path, size in (("checkpoints/step-00000004/state.bin", checkpoint), ("log.txt", 100)):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x" * size)
    with lab.database.write() as session:
        finish(session, claim.token, "train", Succeeded({}), 0, RetryPolicy())
        session.execute(update(Job).where(Job.id == job_id).values(finished_at=db_now() - hours_ago * 3600))
    return job_id


def there(layout: Layout, job_id: str) -> bool:
    return (layout.attempt(job_id, 1) / "checkpoints" / "step-00000004").is_dir()


def test_what_may_go_goes_first_oldest_first_and_no_further_than_needed(lab: Lab, layout: Layout) -> None:
    old, newer, fresh = (ended(lab, layout, name, hours, 4 * MB) for name, hours in (("a", 99), ("b", 50), ("c", 1)))
    within = settings(layout, disk_budget_checkpoints_bytes=10 * MB)
    assert reclaim.reclaim(lab.database, layout, within) == ()
    assert [there(layout, job_id) for job_id in (old, newer, fresh)] == [False, True, True]
    less = settings(layout, disk_budget_checkpoints_bytes=MB)
    (over,) = reclaim.reclaim(lab.database, layout, less)
    assert not there(layout, newer) and there(layout, fresh), "what ended an hour ago may still be tried again"
    assert over.kind == "checkpoints" and over.used >= 4 * MB
    all_of_it = settings(layout, disk_budget_bytes=2 * MB, budget_keep_hours=0)
    assert reclaim.reclaim(lab.database, layout, all_of_it) == ()
    assert not there(layout, fresh)


def test_beyond_a_budget_nothing_starts_and_jobs_say_why(lab: Lab, layout: Layout) -> None:
    ended(lab, layout, "a", 1, 4 * MB)
    job_id = lab.job("waits")
    tight = settings(layout, disk_budget_checkpoints_bytes=3 * MB)
    reclaim.reclaim(lab.database, layout, tight)
    room = Room(lab.database, layout.root, 0, Budget.of(tight))
    room.tell()
    assert room.left() < 0 and room_on(tight, lab.database) < 0
    with lab.database.write() as session:
        assert claims.claim(session, "w", "box", CPU, 60, room=room.left()) is None
        row = session.get_one(Job, job_id)
        assert "waits for room on the data root: checkpoints take 4.0 MB of a budget of 3.0 MB" in row.reason
        assert "EFT_DISK_BUDGET_CHECKPOINTS_BYTES" in row.reason
    with lab.database.read() as session:
        state = budget.room(session, Budget.of(tight), 10**12, 0)
    queue = explain.QueueSettings(free=state.left, silent_after=600.0, over=state.over)
    assert (lab.why("waits", queue).code, "checkpoints take 4.0 MB" in lab.why("waits", queue).reason) == (
        "disk",
        True,
    )

    wide = settings(layout, disk_budget_checkpoints_bytes=30 * MB)
    room = Room(lab.database, layout.root, 0, Budget.of(wide))
    room.tell()
    with lab.database.write() as session:
        assert session.get_one(Job, job_id).reason == "waits for a slot"
        assert claims.claim(session, "w", "box", CPU, 60, room=room.left()) is not None


def test_uploads_count_at_once_and_by_their_rows(lab: Lab) -> None:
    actor = lab.actor("ada")
    with lab.database.write() as session:
        values = {"filename": "a", "sha256": "5" * 64, "rows": 1, "format": "text", "bytes": 7 * MB}
        session.execute(insert(File).values(id="file-a", owner_id=actor.user_id, project_id=actor.project_id, **values))
    with lab.database.read() as session:
        used = budget.measured(session)
    limits = Budget({"uploads": 5 * MB, "total": 100 * MB, "runs": MB})
    assert limits.over(used) == (Over("uploads", 7 * MB, 5 * MB),)
    assert limits.left(used) == -2 * MB
    assert Budget({}).left(used) is None


def test_history_goes_and_the_job_stays(lab: Lab, layout: Layout) -> None:
    job_id, young = ended(lab, layout, "a", 24 * 40, 10), ended(lab, layout, "b", 24, 10)
    with lab.database.write() as session:
        for one in (job_id, young):
            row = session.get_one(Job, one)
            ids = {"job_id": one, "owner_id": row.owner_id, "project_id": row.project_id, "attempt": 1}
            session.execute(insert(Metric).values(**ids, name="loss", step=1, value=1.0, time=1.0))
            session.execute(insert(Event).values(**ids, seq=900, type="samples", data={}))
    rules = RetentionRules(checkpoints_days=0, previews_days=0, history_days=30)
    for expected in ([("history", job_id)], []):
        with lab.database.read() as session:
            found = list(retention.find(session, layout, rules))
        assert [(one.kind, one.id) for one in found] == expected
        assert all(retention.remove(lab.database, layout, None, one) for one in found)
    with lab.database.read() as session:
        assert session.execute(select(Metric.job_id)).scalars().all() == [young]
        kinds = set(session.execute(select(Event.type).where(Event.job_id == job_id)).scalars())
        assert kinds == {"status"} and session.get_one(Job, job_id).status == "succeeded"
    assert not (layout.attempt(job_id, 1) / "log.txt").exists() and (layout.attempt(young, 1) / "log.txt").exists()
