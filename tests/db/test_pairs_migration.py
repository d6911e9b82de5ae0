"""0015 on a database that was in use: jobs that have begun keep the tokens they began with; a limit has an end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sqlalchemy import MetaData, Table, insert, inspect, select

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Attempt, Job, Limit, Project, User
from core.ids import new_id
from core.jobs.lifecycle.submit import Actor
from core.jobs.policies import quotas, volume
from core.spec.job import JobSpec
from core.spec.resolve import resolve

ADA = Actor("user-ada", "proj-lab")


@pytest.fixture
def old(empty_url: str) -> Any:
    database = Database(empty_url)
    migrate.upgrade(database, "0014")
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
    yield database
    database.dispose()


def stored(
    database: Database, *, status: str = "paused", attempt: str | None = None, pairs: str = "", **more: Any
) -> str:
    """A job as a version before this one has stored it: without `pairs`, unless some are given."""
    spec = resolve(JobSpec.model_validate({"model": "example-org/m", "data": "file-01kar3v8x5m2h6n9qst4wyz0bc"}))
    with database.write() as session:
        job_id = new_id("job")
        document = spec.model_dump(mode="json")
        document["data"]["rendering"].pop("pairs")
        document["data"]["rendering"] |= {"pairs": pairs} if pairs else {}
        # Not through `submit`: it writes columns that the old table does not have.
        about = {"owner_id": ADA.user_id, "project_id": ADA.project_id, "kind": "train", "accelerator": "any"}
        values = {
            "spec": document,
            "status": status,
            "queue_key": "any|",
            "request_id": "",
            "reason": "",
            "event_seq": 0,
        }
        there = {column["name"] for column in inspect(session.connection()).get_columns("jobs")}
        jobs = Table("jobs", MetaData(), *(column._copy() for column in Job.__table__.columns if column.name in there))
        session.execute(insert(jobs).values(id=job_id, **about, **values, **{"priority": 0, "resume_from": []} | more))
        if attempt is not None:
            ids = {"job_id": job_id, "attempt": 1, "owner_id": ADA.user_id, "project_id": ADA.project_id}
            session.execute(insert(Attempt).values(**ids, kind=attempt, node="box", worker="w", slot="cpu"))
    return job_id


def test_what_has_begun_keeps_its_tokens(old: Database) -> None:
    begun = [
        stored(old, attempt="train"),
        stored(old, status="queued", furthest_step=2),
        stored(old, status="failed", attempt="train"),
        stored(old, status="queued", resume_from=[{"job": "job-before", "attempts": 1}]),
    ]
    other = {
        stored(old): None,
        stored(old, status="queued", attempt="prepare"): None,
        stored(old, status="succeeded", attempt="train"): None,
        stored(old, attempt="train", pairs="space"): "space",
    }
    with old.write() as session:
        for project in session.execute(select(Project)).scalars():
            project.spec_bytes = sum(volume.size(spec) for spec in session.execute(select(Job.spec)).scalars())
    migrate.upgrade(old)
    with old.read() as session:
        specs = {job.id: job.spec for job in session.execute(select(Job)).scalars()}
        assert session.execute(select(Project.spec_bytes)).scalar_one() == sum(map(volume.size, specs.values()))
    found = {job_id: spec["data"]["rendering"].get("pairs") for job_id, spec in specs.items()}
    assert found == dict.fromkeys(begun, "joined") | other
    for spec in specs.values():
        JobSpec.model_validate(spec)


def test_a_limit_that_was_infinite_is_none(old: Database) -> None:
    with old.write() as session:
        for scope, subject, values in (
            ("owner", ADA.user_id, {"shares": math.inf, "gpu_hours_week": math.inf, "max_running": 2}),
            ("project", ADA.project_id, {"gpu_hours_week": 8.5}),
        ):
            session.execute(insert(Limit).values(scope=scope, subject_id=subject, **values))
    migrate.upgrade(old)
    with old.read() as session:
        rows = {row.scope: row for row in session.execute(select(Limit)).scalars()}
        assert [getattr(rows["owner"], name) for name in quotas.FIELDS[:4]] == [1_000_000, None, 2, None]
        assert (rows["owner"].gpu_hours_week, rows["project"].gpu_hours_week) == (None, 8.5)
