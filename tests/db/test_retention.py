"""What the rules of retention let go, and what they never touch: real rows, real folders."""

from __future__ import annotations

import pytest
from sqlalchemy import func, insert, select, update

from core.db.engine import db_now
from core.db.tables import Artifact, Audit, Event, File, Job
from core.jobs.lifecycle import retention
from core.jobs.lifecycle.finish import Failed, Outcome, Requeued, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.retention import DAY, RetentionRules
from core.jobs.lifecycle.submit import retry, submit
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support.lab import Lab

pytestmark = pytest.mark.one_database

RULES = RetentionRules(checkpoints_days=30, previews_days=30, unused_files_days=90)


def run(lab: Lab, layout: Layout, name: str, *outcomes: Outcome, days_ago: float, job_id: str | None = None) -> str:
    """A job whose attempts ended so; each has a log, a checkpoint, and artifacts."""
    job_id = job_id or lab.job(name)
    lab.ids[name] = job_id
    for outcome in outcomes:
        claim = lab.claim()
        assert claim is not None and claim.token.job_id == job_id
        folder = layout.attempt(job_id, claim.token.attempt)
        for path in ("log.txt", "checkpoints/step-4/state.bin", "artifacts/adapter/weights.bin"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(b"x" * 5000)
        with lab.database.write() as session:
            finish(session, claim.token, "train", outcome, 0, RetryPolicy(max_machine_failures=0))
    with lab.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(finished_at=db_now() - days_ago * DAY))
    return job_id


def collect(lab: Lab, layout: Layout, rules: RetentionRules = RULES) -> list[tuple[str, str]]:
    with lab.database.read() as session:
        found = list(retention.find(session, layout, rules))
    assert all(one.bytes > 0 for one in found if one.paths)
    return [(one.kind, one.id) for one in found if retention.remove(lab.database, layout, None, one)]


def left(layout: Layout, job_id: str) -> list[str]:
    return sorted(str(path.relative_to(layout.job(job_id))) for path in layout.job(job_id).rglob("*") if path.is_file())


ARTIFACT = {"path": "adapter/weights.bin", "kind": "adapter", "bytes": 5000, "sha256": "0" * 64}


def test_an_ended_job_keeps_what_it_hands_back_and_its_logs(lab: Lab, layout: Layout) -> None:
    done = run(lab, layout, "a", Requeued("a test"), Succeeded({"ok": 1}, [ARTIFACT]), days_ago=31)
    young = run(lab, layout, "b", Succeeded({"ok": 1}, [ARTIFACT]), days_ago=29)
    before = left(layout, young)
    assert collect(lab, layout, RetentionRules(0, 0, 0)) == []
    assert collect(lab, layout) == [("checkpoints", done)]
    assert left(layout, done) == ["attempt-1/log.txt", "attempt-2/artifacts/adapter/weights.bin", "attempt-2/log.txt"]
    assert left(layout, young) == before
    assert collect(lab, layout) == [], "once"
    with lab.database.read() as session:
        assert session.execute(select(Audit.target).where(Audit.action == "gc.remove")).scalars().all() == [done]
        assert session.execute(select(func.count()).select_from(Artifact)).scalar_one() == 2


def test_what_a_retry_may_need_stays(lab: Lab, layout: Layout) -> None:
    old = run(lab, layout, "old", Failed("user", "x", "y"), days_ago=99)
    actor = lab.actor("ada")
    with lab.database.write() as session:
        again = retry(session, actor, old)
        again.prepared = {"model_dir": "m"}
        again_id = again.id
    assert collect(lab, layout) == [], "the retry waits"
    run(lab, layout, "again", Failed("user", "x", "y"), days_ago=1, job_id=again_id)
    assert collect(lab, layout) == [], "it may be tried again"
    with lab.database.write() as session:
        session.execute(update(Job).where(Job.id == again_id).values(finished_at=db_now() - 31 * DAY))
    with lab.database.read() as session:
        found = list(retention.find(session, layout, RULES))
    assert {one.id for one in found} == {old, again_id}
    with lab.database.write() as session:
        third = retry(session, actor, again_id).id
    assert [retention.remove(lab.database, layout, None, one) for one in found] == [False, False], (
        "tried again meanwhile"
    )
    assert "attempt-1/checkpoints/step-4/state.bin" in left(layout, old)
    assert third not in (old, again_id)


def test_previews_go_with_their_rows(lab: Lab, layout: Layout) -> None:
    spec = resolve(JobSpec.model_validate({"model": "team/tiny", "data": "file-0123456789abcdefghjkmnpqrs"}))
    actor, made = lab.actor("ada"), []
    for age in (40, 10):
        with lab.database.write() as session:
            row = submit(session, actor, spec, kind="preview")
            row.status, row.finished_at = "succeeded", row.created_at - age * DAY
            made.append(row.id)
        layout.job(made[-1]).mkdir(parents=True)
        (layout.job(made[-1]) / "log.txt").write_text("rendered")
    assert collect(lab, layout) == [("preview", made[0])]
    assert not layout.job(made[0]).exists() and layout.job(made[1]).exists()
    with lab.database.read() as session:
        assert session.execute(select(Job.id)).scalars().all() == [made[1]]
        assert session.execute(select(Event.job_id)).scalars().all() == [made[1]]


def test_files_that_no_job_has_ever_named(lab: Lab, layout: Layout) -> None:
    actor = lab.actor("ada")
    names = {name: f"file-{name * 26}"[:31] for name in "abc"}
    for name, file_id in names.items():
        layout.file(file_id).write_bytes(b"rows")
        with lab.database.write() as session:
            age = 10 if name == "c" else 100
            values = {"filename": name, "bytes": 4, "sha256": name, "rows": 1, "format": "text"}
            whose = {"owner_id": actor.user_id, "project_id": actor.project_id}
            session.execute(insert(File).values(id=file_id, created_at=db_now() - age * DAY, **values, **whose))
    with lab.database.write() as session:
        spec = JobSpec.model_validate({"model": "team/tiny", "data": names["a"]})
        submit(session, actor, resolve(spec)).status = "cancelled"
    assert collect(lab, layout, RetentionRules(30, 30, 0)) == []
    assert collect(lab, layout) == [("file", names["b"])]
    assert [layout.file(file_id).exists() for file_id in names.values()] == [True, False, True]


def test_what_was_set_aside_and_not_deleted_goes_with_the_next(layout: Layout) -> None:
    for path in ("job-x/attempt-1/.gone-1/step", ".gone-2", "job-x/attempt-1/checkpoints"):
        (layout.runs / path).mkdir(parents=True)
    assert retention.sweep(layout) == 2
    assert sorted(path.name for path in layout.runs.rglob("*")) == ["attempt-1", "checkpoints", "job-x"]
