"""A slot whose device fails its self-test is not offered, and the node's row says why; others are served meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import func, insert, select

from core.db.engine import Database
from core.db.tables import Attempt, Job, Node, Project, User
from core.hardware import selftest as verdicts
from core.jobs.lifecycle.submit import Actor, submit
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support import migrated
from tests.support.hardware import unpack
from tests.support.service import wait_for
from worker.agent.agent import Agent

ADA = Actor("user-ada", "proj-lab")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        data=tmp_path / "data", node="box", min_free_bytes=1, sweep_seconds=0.2, relay_seconds=0.1, spare=False
    )


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    settings.root.mkdir()
    migrated.lay(settings.root / "eft.db")
    database = Database(settings.sqlalchemy_url)
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
    yield database
    database.dispose()


def add_job(database: Database, folder: Path) -> str:
    """Its model is said to be there and has no weights: its trainer ends by itself, soon."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": " b"}\n')
    model = folder / "no-weights"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    with database.write() as session:
        job = submit(session, ADA, resolve(JobSpec.model_validate({"model": "team/tiny", "data": str(rows)})))
        job.prepared = {"model_dir": str(model)}
        return job.id


def node(database: Database) -> Node:
    with database.read() as session:
        return session.execute(select(Node)).scalar_one()


def status(database: Database, job_id: str) -> str:
    with database.read() as session:
        return session.execute(select(Job.status).where(Job.id == job_id)).scalar_one()


def claimed(database: Database) -> int:
    with database.read() as session:
        return session.execute(select(func.count()).select_from(Attempt)).scalar_one()


def test_a_card_that_torch_does_not_see_is_not_offered(settings: Settings, database: Database, tmp_path: Path) -> None:
    """The kernel lists an MI300X, and torch here is built for CPUs: without a self-test jobs would fail on that slot
    one after the other, or train on the processor."""
    unpack("mi300x", tmp_path / "box")
    job = add_job(database, settings.root)
    agent = Agent(settings.model_copy(update={"sysfs": tmp_path / "box" / "sys", "data_roots": (settings.root,)}))
    try:
        agent.start(lambda _: None, lambda: 0)
        slot = node(database).slots[0]
        assert slot["kind"] == "gpu" and "self-test" in slot["quarantined"], "not before it is known"
        agent.serve()
        assert claimed(database) == 0
        wait_for(lambda: node(database).slots[0].get("selftest") == "refused", 200, "the verdict")
        said = node(database)
        assert "sees no GPU here" in said.slots[0]["quarantined"]
        assert any("sees no GPU here" in note for note in said.notes)
        agent.serve()
        assert status(database, job) == "queued" and claimed(database) == 0, "a claim that failed is queued again"
    finally:
        agent.stop()
    (written,) = verdicts.folder(Layout(settings.root).cache).glob("box-*.json")
    told = verdicts.read(written)
    assert told is not None and told.arch == "gfx942" and "sees no GPU here" in (told.refused or "")
