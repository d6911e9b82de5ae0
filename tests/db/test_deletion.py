"""Jobs that people delete: what goes, what stays, and what may not go. And what a project may leave in the database."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from api.metrics.collect import collect
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base, Job, Project
from core.errors import Conflict, NotFound
from core.jobs.lifecycle import deletion, previews, retention
from core.jobs.lifecycle.deletion import Freed
from core.jobs.lifecycle.finish import Failed, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.submit import Actor, cancel, retry, submit
from core.jobs.policies import quotas, usage, volume
from core.jobs.policies.volume import QueueFull, SpecsFull, VolumeLimits
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support.lab import QUEUE_SETTINGS, Lab

HALF_LIFE = 3600.0
FILE = "file-0123456789abcdefghjkmnpqrs"
FAILED = Failed("user", "x", "y")


def spec(**fields: Any) -> JobSpec:
    return resolve(JobSpec.model_validate({"model": "team/tiny", "data": FILE, **fields}))


def run(lab: Lab, name: str, outcome: Any, job_id: str | None = None) -> str:
    job_id = job_id or lab.job(name)
    claim = lab.claim()
    assert claim is not None and claim.token.job_id == job_id
    with lab.database.write() as session:
        finish(session, claim.token, "train", outcome, 0, RetryPolicy(max_machine_failures=0))
    return job_id


def delete(lab: Lab, job_id: str, actor: Actor | None = None) -> bool:
    actor = actor or lab.actor("ada")
    with lab.database.write() as session:
        return deletion.remove(session, actor, job_id, Freed(1, 2, 3), HALF_LIFE)


def again(lab: Lab, job_id: str) -> str:
    with lab.database.write() as session:
        row = retry(session, Actor("user-ada", "proj-lab"), job_id)
        row.prepared = {"model_dir": "m"}
        return row.id


def rows_naming(lab: Lab, job_id: str) -> dict[str, int]:
    """Rows of any table that name the job, wherever."""
    found = {}
    with lab.database.read() as session:
        for table in Base.metadata.sorted_tables:
            count = sum(job_id in repr(tuple(row)) for row in session.execute(select(table)))
            if count:
                found[table.name] = count
    return found


def test_rows_go_and_the_books_stay(lab: Lab) -> None:
    lab.box("box-1", [{"id": "cpu", "kind": "cpu"}])
    other = run(lab, "other", Succeeded({}))
    artifact = {"path": "a", "kind": "adapter", "bytes": 1, "sha256": "0" * 64}
    job_id = run(lab, "gone", Succeeded({}, [artifact]))
    lab.wait(100)
    with lab.database.read() as session:
        told_before = {family.name: sorted(family.lines) for family in collect(session, QUEUE_SETTINGS)}
        before = sum(span.ended - span.began for span in usage.open_spans(session) if span.ended)
    assert delete(lab, job_id)
    assert rows_naming(lab, job_id) == {"audit": 2}, "its submit and its end"
    assert rows_naming(lab, other)["jobs"] == 1
    with lab.database.read() as session:
        left = sum(span.ended - span.began for span in usage.open_spans(session) if span.ended)
        booked = sum(row.billed for row in usage.booked(session))
        told = session.execute(text("SELECT data FROM audit WHERE action = 'job.delete'")).scalar_one()
    assert left < before and booked >= 0, "its time was charged before its rows went"
    assert '"bytes": 6' in str(told) or "'bytes': 6" in str(told)
    assert delete(lab, job_id) is False, "once more is fine"
    with lab.database.read() as session:
        now = {family.name: sorted(family.lines) for family in collect(session, QUEUE_SETTINGS)}
    assert now["eft_jobs"] == told_before["eft_jobs"], "metrics go on counting it"
    assert now["eft_job_wait_seconds"] == told_before["eft_job_wait_seconds"]


def test_what_may_not_go(lab: Lab) -> None:
    waiting, ada = lab.job("waiting"), lab.actor("ada")
    with pytest.raises(Conflict, match="is queued; only an ended job") as refused:
        delete(lab, waiting)
    assert refused.value.code == "not_ended"
    with lab.database.write() as session:
        cancel(session, ada, waiting)
    stranger = Actor("user-ada", lab.actor("ada", "rivals").project_id)
    for whose, job_id in ((stranger, waiting), (ada, "job-" + "0" * 26)):
        with pytest.raises(NotFound):
            delete(lab, job_id, whose)
    assert delete(lab, waiting)
    with pytest.raises(NotFound):  # not even that it was there
        delete(lab, waiting, stranger)


def test_what_a_retry_goes_on_from_stays_until_it_has_succeeded(lab: Lab) -> None:
    first = run(lab, "first", FAILED)
    second = again(lab, first)
    for outcome in (None, FAILED):
        if outcome is not None:
            run(lab, "second", outcome, second)
        with pytest.raises(Conflict, match=f"`{second}` may continue from checkpoints of this job") as refused:
            delete(lab, first)
        assert refused.value.code == "job_in_use"
    third = again(lab, second)
    run(lab, "third", Succeeded({}), third)
    assert delete(lab, second)
    assert delete(lab, first)
    with lab.database.read() as session:
        assert session.get_one(Job, third).retry_of is None


def test_previews_of_old_go_as_jobs_do(lab: Lab, layout: Layout) -> None:
    actor = lab.actor("ada")
    with lab.database.write() as session:
        row = submit(session, actor, spec(), kind="preview")
        row.status, row.finished_at = "succeeded", row.created_at - 99 * retention.DAY
        assert session.get_one(Project, actor.project_id).spec_bytes > 0
    with lab.database.read() as session:
        found = list(retention.find(session, layout, retention.RetentionRules()))
    assert [retention.remove(lab.database, layout, None, one) for one in found] == [True]
    with lab.database.read() as session:
        assert session.get_one(Project, actor.project_id).spec_bytes == 0


def test_a_rule_finds_nothing_left_of_a_deleted_job(lab: Lab, layout: Layout) -> None:
    job_id = run(lab, "a", FAILED)
    (layout.attempt(job_id, 1) / "checkpoints").mkdir(parents=True)
    with lab.database.write() as session:
        session.execute(update(Job).values(finished_at=1.0))
    with lab.database.read() as session:
        found = list(retention.find(session, layout, retention.RetentionRules()))
    assert [one.id for one in found] == [job_id]
    assert delete(lab, job_id)
    assert [retention.remove(lab.database, layout, None, one) for one in found] == [False]


# -- bounds


def counted(database: Database, project_id: str) -> tuple[int, int]:
    """What the project's row says, and what its jobs have."""
    with database.read() as session:
        said = session.get_one(Project, project_id).spec_bytes
        specs = session.execute(select(Job.spec).where(Job.project_id == project_id)).scalars()
        return said, sum(volume.size(one) for one in specs)


def test_specs_are_counted_and_bounded(lab: Lab) -> None:
    actor = lab.actor("ada")
    long = spec(data={"train": FILE, "rendering": {"type": "model", "system_prompt": "ä" * 20_000}})
    bounds = VolumeLimits(spec_bytes=300_000)
    made = []
    with pytest.raises(SpecsFull, match=r"EFT_MAX_SPEC_BYTES.*eft delete") as full:
        for _ in range(4):
            with lab.database.write() as session:
                made.append(submit(session, actor, long, bounds=bounds).id)
    assert (len(made), full.value.status) == (2, 507)
    said, stored = counted(lab.database, actor.project_id)
    assert said == stored > 240_000
    with lab.database.write() as session:
        cancel(session, actor, made[0])
    assert delete(lab, made[0])
    assert counted(lab.database, actor.project_id)[0] == stored / 2
    with lab.database.write() as session:
        submit(session, actor, long, bounds=bounds)
    rival = lab.actor("ada", "rivals")
    with lab.database.write() as session:  # another project has its own
        submit(session, rival, long, bounds=bounds)


def test_waiting_jobs_are_bounded(lab: Lab) -> None:
    actor, bounds = lab.actor("ada"), VolumeLimits(waiting=2)
    for _ in range(2):
        with lab.database.write() as session:
            last = submit(session, actor, spec(), bounds=bounds).id
    words = r"^2 jobs of this project wait already.*EFT_MAX_WAITING_JOBS"
    with pytest.raises(QueueFull, match=words), lab.database.write() as session:
        submit(session, actor, spec(), bounds=bounds)
    said, stored = counted(lab.database, actor.project_id)
    assert said == stored, "what was refused counts for nothing"
    with lab.database.write() as session:
        cancel(session, actor, last)
        submit(session, actor, spec(), bounds=bounds)
    with pytest.raises(QueueFull), lab.database.write() as session:
        retry(session, actor, last, bounds)


def test_bounds_hold_when_all_submit_at_once(lab: Lab) -> None:
    actor, bounds = lab.actor("ada"), VolumeLimits(waiting=3)
    barrier = threading.Barrier(8)
    refused: list[QueueFull] = []

    def send() -> None:
        barrier.wait()
        try:
            with lab.database.write() as session:
                submit(session, actor, spec(), bounds=bounds)
        except QueueFull as error:
            refused.append(error)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with lab.database.read() as session:
        assert session.execute(select(func.count()).select_from(Job)).scalar_one() == 3
    assert len(refused) == 5


def test_previews_have_a_quota(lab: Lab) -> None:
    actor = lab.actor("ada")

    def ask(owner: Actor = actor, length: int = 64) -> str:
        with lab.database.write() as session:
            asked = spec(training={"max_length": length})
            return previews.ask(session, owner, asked, FILE, VolumeLimits(previews=2)).id

    assert len({ask(length=64), ask(length=65), ask(length=65)}) == 2, "the same question is one"
    with pytest.raises(QueueFull, match=r"2 previews of this project .*EFT_MAX_PREVIEWS"):
        ask(length=66)
    with lab.database.write() as session:
        quotas.change(session, actor, "project", "lab", {"max_previews": 3})
    ask(length=66)
    with lab.database.write() as session:
        quotas.change(session, actor, "owner", "ada", {"max_previews": 0})
        quotas.change(session, actor, "project", "lab", {"max_previews": None})
    with pytest.raises(QueueFull, match=r"0 previews of this owner .*eft quota list"):
        ask(lab.actor("ada", "rivals"), length=67)
    ask(lab.actor("bob", "rivals"), length=67)


def test_an_upgrade_counts_what_is_there(empty_url: str) -> None:
    database = Database(empty_url)
    migrate.upgrade(database, "0011")
    with database.write() as session:
        session.execute(
            text("INSERT INTO users (id, name, created_at, box_admin) VALUES ('u', 'u', 1, :no)"), {"no": False}
        )
        session.execute(text("INSERT INTO projects (id, name, created_at) VALUES ('p', 'p', 1), ('q', 'q', 1)"))
    migrate.upgrade(database)
    assert counted(database, "p") == (0, 0)
    with database.write() as session:
        submit(
            session, Actor("u", "p"), spec(data={"train": FILE, "rendering": {"type": "model", "system_prompt": "ü"}})
        )
    assert counted(database, "p")[0] == counted(database, "p")[1] > 0
    migrate.downgrade(database, "0011")
    migrate.upgrade(database)
    assert counted(database, "p")[0] == counted(database, "p")[1] > 0
    assert counted(database, "q") == (0, 0)
    database.dispose()
