"""A GPU whose memory does not come back after its trainer's end: out of use, shown so, and in use again when it has.

The box is made up (a tree like /sys, whose files this test changes); worker, database and processes are real.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Job, Node, Project, User
from core.hardware.discover import discover
from core.jobs.submit import Actor, submit
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support.hardware import unpack
from tests.support.service import wait_for
from worker import gpu_memory
from worker.agent import Agent

ADA = Actor("user-ada", "proj-lab")
GIB = 1 << 30


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Of a box with one MI300X: the file of its used memory."""
    used = unpack("mi300x", tmp_path / "box") / "sys/class/drm/renderD128/device/mem_info_vram_used"
    used.write_text(f"{GIB}\n")
    return used


@pytest.fixture
def settings(tmp_path: Path, used: Path) -> Settings:
    return Settings(
        data=tmp_path / "data",
        node="box",
        sysfs=tmp_path / "box" / "sys",
        min_free_bytes=1,
        gpu_clear_seconds=0.5,
        sweep_seconds=0.2,
        relay_seconds=0.1,
        spare=False,
        selftest_seconds=0,  # there is no such card
    )


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    settings.root.mkdir()
    database = Database(settings.sqlalchemy_url)
    migrate.upgrade(database)
    with database.write() as session:
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
    yield database
    database.dispose()


def add_job(database: Database, folder: Path) -> str:
    """Its model is said to be there and has no weights: its trainer ends by itself, soon."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": " b"}\n')
    spec = JobSpec.model_validate({"model": "team/tiny", "data": str(rows)})
    model = folder / "no-weights"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    with database.write() as session:
        job = submit(session, ADA, resolve(spec))
        job.prepared = {"model_dir": str(model)}
        return job.id


def status(database: Database, job_id: str) -> str:
    with database.read() as session:
        return session.execute(select(Job.status).where(Job.id == job_id)).scalar_one()


def node(database: Database) -> Node:
    with database.read() as session:
        return session.execute(select(Node)).scalar_one()


def test_used_memory_is_read_of_the_right_card(settings: Settings, used: Path) -> None:
    (gpu,) = discover(sysfs=settings.sysfs).gpus
    assert gpu.render == "renderD128"
    assert gpu_memory.used(gpu, settings.sysfs) == GIB
    assert gpu_memory.cleared(gpu, settings.sysfs, GIB, 0) is None
    used.write_text(str(3 * GIB))
    assert gpu_memory.cleared(gpu, settings.sysfs, GIB, 0) == 3 * GIB
    threading.Timer(0.3, used.write_text, [str(GIB + (1 << 20))]).start()
    assert gpu_memory.cleared(gpu, settings.sysfs, GIB, 10) is None, "a driver may take its time"
    used.unlink()
    assert gpu_memory.used(gpu, settings.sysfs) is None


def test_quarantine_until_the_memory_is_back(settings: Settings, used: Path, database: Database) -> None:
    settings = settings.model_copy(update={"data_roots": (settings.root,)})
    first = add_job(database, settings.root)
    agent = Agent(settings)
    try:
        agent.start(lambda _: None, lambda: 0)
        serving = threading.Thread(target=agent.serve)
        serving.start()
        wait_for((Layout(settings.root).attempt(first, 1) / "run.json").exists, 20, "its start")
        used.write_text(str(5 * GIB))
        serving.join(60)
        assert status(database, first) == "failed"
        slot = agent.slots[0].id
        wait_for(lambda: node(database).slots[0].get("quarantined"), 5, "the node's row")
        assert "4096 MiB" not in node(database).notes[-1] and "5120 MiB of its memory" in node(database).notes[-1]
        second = add_job(database, settings.root)
        agent.serve()
        assert status(database, second) == "queued", "nothing runs on such a GPU"
    finally:
        agent.stop()

    agent = Agent(settings)
    try:
        agent.start(lambda _: None, lambda: 0)
        assert "quarantined" in node(database).slots[0], "the next worker knows it too"
        agent.serve()
        assert status(database, second) == "queued"
        used.write_text(str(GIB))
        wait_for(lambda: "quarantined" not in node(database).slots[0], 5, "the end of the quarantine")
        assert node(database).slots[0]["id"] == slot and not [n for n in node(database).notes if "quarantine" in n]
        time.sleep(0.1)
        agent.serve()
        assert status(database, second) == "failed", "it was tried"
    finally:
        agent.stop()
