"""A GPU whose memory does not come back after its trainer's end: out of use, shown so, and in use again when it has.

The box is made up (a tree like /sys, whose files this test changes); worker, database and processes are real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from core.db.engine import Database
from core.db.tables import Attempt, Job, Metric, Node, Project, User
from core.hardware.discover import Gpu, discover
from core.jobs.lifecycle.claims import claim
from core.jobs.lifecycle.submit import Actor, submit
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.spec.run.folder import EVENTS_FILE
from tests.support import migrated
from tests.support.hardware import unpack
from tests.support.service import wait_for
from worker.agent.agent import Agent
from worker.attempt.event_relay import EventRelay
from worker.gpus import gpu_memory
from worker.gpus.foreign_processes import ForeignProcesses

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
        max_machine_failures=0,
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


def trainer_of(database: Database, job_id: str) -> int:
    """The number of its process, once it has one: a test ends it before it has imported torch, which sees no GPU."""

    def look() -> int | None:
        with database.read() as session:
            return session.scalars(select(Attempt.pid).where(Attempt.job_id == job_id)).one_or_none()

    return int(wait_for(look, 90, "its start"))


def ended(database: Database, job_id: str) -> bool:
    """Whether it has had an attempt, which is over."""
    with database.read() as session:
        ends = session.scalars(select(Attempt.ended_at).where(Attempt.job_id == job_id)).all()
        return bool(ends) and None not in ends


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
    assert gpu_memory.cleared(gpu, settings.sysfs, GIB, 60) is None, "a driver may take its time"
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
        pid = trainer_of(database, first)
        used.write_text(str(5 * GIB))
        os.kill(pid, signal.SIGKILL)
        serving.join(200)
        assert ended(database, first)
        slot = agent.slots[0].id
        wait_for(lambda: node(database).slots[0].get("quarantined"), 60, "the node's row")
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
        wait_for(lambda: "quarantined" not in node(database).slots[0], 60, "the end of the quarantine")
        assert node(database).slots[0]["id"] == slot and not [n for n in node(database).notes if "quarantine" in n]
        trying = threading.Thread(target=wait_for, args=(lambda: agent.serve() or ended(database, second), 60, "a try"))
        trying.start()
        os.kill(trainer_of(database, second), signal.SIGKILL)
        trying.join(90)
        assert ended(database, second)
    finally:
        agent.stop()


# -- somebody uses it beside eft


def test_nothing_is_claimed_on_a_gpu_that_somebody_uses(settings: Settings, used: Path, database: Database) -> None:
    """Process 1 is nobody's of ours; a child of this process is as a trainer of the worker would be."""
    settings = settings.model_copy(update={"data_roots": (settings.root,), "node_labels": ("fast",)})
    (gpu,) = discover(sysfs=settings.sysfs).gpus
    ours = subprocess.Popen(["/bin/sleep", "120"])
    for pid in (1, ours.pid):
        folder = settings.sysfs / "class/kfd/kfd/proc" / str(pid)
        folder.mkdir(parents=True)
        (folder / f"vram_{gpu.kfd_id}").write_text(f"{2 * GIB + 5}\n")
    job_id = add_job(database, settings.root)
    agent = Agent(settings)
    try:
        agent.start(lambda _: None, lambda: 0)
        (process,) = node(database).slots[0]["processes"]
        assert (process["pid"], process["user"], process["bytes"]) == (1, "root", 2 * GIB)
        assert node(database).labels == ["fast"]
        warm = {"celsius": 78, "watts": 742}
        assert node(database).slots[0]["gpu"]["live"] == {"busy_percent": 97, "used_bytes": GIB, **warm}
        used.write_text(str(2 * GIB))
        told = {"busy_percent": 97, "used_bytes": 2 * GIB, **warm}
        wait_for(lambda: node(database).slots[0]["gpu"]["live"] == told, 60, "the node's row to follow the card")
        agent.serve()
        assert status(database, job_id) == "queued"
        (settings.sysfs / "class/kfd/kfd/proc/1" / f"vram_{gpu.kfd_id}").unlink()
        wait_for(lambda: "processes" not in node(database).slots[0], 60, "the end of the other's work")
        wait_for(lambda: agent.slots[0].id not in agent._others, 60, "it to be offered again")
    finally:
        agent.stop()
        ours.kill()
        ours.wait()


def test_nvidias_processes(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nvidia-smi"
    program.write_text(
        f"#!/bin/sh\necho 'GPU-a, 1, 700'\necho 'GPU-a, {os.getpid()}, 600'\necho 'GPU-b, 999999999, [N/A]'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    gpus = {
        name: Gpu(index, "nvidia", name, "", name, "sm_90", 1) for index, name in enumerate(("GPU-a", "GPU-b", "GPU-c"))
    }
    others = ForeignProcesses(gpus, settings.sysfs)
    others.look()
    assert [name in others for name in gpus] == [True, True, False]
    assert [(p["pid"], p["user"], p["bytes"]) for p in others.as_slot("GPU-a")["processes"]] == [(1, "root", 512 << 20)]
    assert others.as_slot("GPU-b")["processes"] == [{"pid": 999999999, "user": None, "name": None, "bytes": 0}]
    program.write_text("#!/bin/sh\nexit 9\n")
    others.look()
    assert "GPU-a" not in others


def test_the_newest_step_of_a_job_has_what_its_gpus_do(settings: Settings, used: Path, database: Database) -> None:
    settings = settings.model_copy(update={"data_roots": (settings.root,)})
    job_id = add_job(database, settings.root)
    agent = Agent(settings)
    slot = next(slot for slot in agent.slots if slot.kind == "gpu")
    with database.write() as session:
        won = claim(session, "wrk-1", "box", slot, 60)
    assert won is not None and won.token.job_id == job_id
    steps = [{"seq": n, "time": 1.0, "type": "metrics", "step": n, "values": {"loss": 2.0}} for n in (1, 2)]
    (settings.root / EVENTS_FILE).write_text("".join(f"{json.dumps(one)}\n" for one in steps))
    assert agent.site.figures is not None
    agent.site.figures.look()
    assert EventRelay(agent.site, won, settings.root).tell() == ""
    with database.read() as session:
        rows = session.execute(select(Metric.step, Metric.name, Metric.value).where(Metric.job_id == job_id)).all()
    assert sorted(tuple(row) for row in rows) == [
        (1, "loss", 2.0),
        (2, "gpu_busy_percent", 97.0),
        (2, "gpu_celsius", 78.0),
        (2, "gpu_watts", 742.0),
        (2, "loss", 2.0),
    ]
