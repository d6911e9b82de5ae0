"""The agent of a box, in this process, with real children: what it refuses, claims, loses and hands back."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import func, insert, select, update

from core import HOME
from core.base import forks as base_forks
from core.db import migrate
from core.db.engine import Database, db_now
from core.db.tables import Allocation, Attempt, Event, File, Job, Metric, Project, UsageDay, User
from core.ids import new_id
from core.jobs.kinds import Kind
from core.jobs.lifecycle import claims, lease_expiry
from core.jobs.lifecycle.claims import Slot
from core.jobs.lifecycle.lease_expiry import LossPolicy
from core.jobs.lifecycle.submit import Actor, cancel, submit
from core.jobs.policies import holds, maintenance
from core.settings import Settings
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support import forks as support_forks
from tests.support import hub, migrated, selftest
from tests.support.service import wait_for
from worker.agent.agent import Agent
from worker.attempt.attempt import AttemptRunner
from worker.attempt.fork_server import ForkServer
from worker.environment import child_environment
from worker.preflight import node

ADA = Actor("user-ada", "proj-lab", "req-7")


class SharedForks(ForkServer):
    """Forks the children of all agents here, so that not each of them imports torch: it outlives an agent's stop."""

    def stop(self) -> None:
        pass

    def end(self) -> None:
        super().stop()

    def share(self, agent: Agent) -> None:
        """With an agent whose children have the same environment; another keeps a fork server of its own."""
        own = agent.site.forks
        if own is not None and own._environment == self._environment:
            own.stop()
            agent.site.forks = self


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data root of each test in its turn: a child's environment names it."""
    return tmp_path_factory.mktemp("box") / "data"


@pytest.fixture(scope="module")
def forks(data: Path) -> Iterator[SharedForks]:
    threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    server = SharedForks(child_environment(Kind.TRAIN, gpu=None, threads=threads, root=data), lambda: False)
    thread = threading.Thread(target=server.run)
    with mock.patch.object(base_forks, "launch", support_forks.launch):
        thread.start()
        yield server
    server.end()
    thread.join(90)
    assert not thread.is_alive()


class Box:
    """A data root, a database with a user, and the agents that serve it."""

    def __init__(self, root: Path, data: Path, models: Path, forks: SharedForks) -> None:
        self.forks = forks
        self.settings = Settings(
            data=data,
            node="box",
            model_roots=(models,),
            data_roots=(root / "rows",),
            lease_seconds=60,  # no trainer is fenced because this machine was busy for a few seconds
            renew_seconds=0.5,
            fence_seconds=40,
            relay_seconds=0.1,
            retry_backoff_seconds=5,
            max_machine_failures=1,
            stop_grace_seconds=60,
            spare=False,
        )
        self.rows = root / "rows"
        self.rows.mkdir()
        (self.rows / "train.jsonl").write_text(
            "".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(32))
        )
        self.model = models / "tiny"
        self.layout = Layout(self.settings.root)
        self.layout.create()
        selftest.lay(self.settings.root, "box")
        self.database = Database(self.settings.sqlalchemy_url)
        self.agents: list[Agent] = []
        self.rings: list[str] = []

    def migrate(self) -> None:
        migrated.lay(self.settings.root / "eft.db")
        migrate.upgrade(self.database)
        with self.database.write() as session:
            session.execute(insert(User).values(id=ADA.user_id, name="ada"))
            session.execute(insert(Project).values(id=ADA.project_id, name="lab"))

    def agent(self, *, start: bool = True) -> Agent:
        agent = Agent(self.settings)
        self.agents.append(agent)
        if start:
            agent.start(self.rings.append, lambda: 0)
            self.forks.share(agent)
        return agent

    def submit(self, **changes: Any) -> str:
        spec = {
            "model": str(self.model),
            "data": str(self.rows / "train.jsonl"),
            "training": {"max_steps": 4, "per_device_train_batch_size": 2, "max_length": 64},
            **changes,
        }
        with self.database.write() as session:
            return submit(session, ADA, resolve(JobSpec.model_validate(spec))).id

    def long(self) -> str:
        """Its model is there: the first attempt trains."""
        job_id = self.submit(training={"max_steps": 100_000, "per_device_train_batch_size": 2, "max_length": 64})
        with self.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(prepared={"model_dir": str(self.model)}))
        return job_id

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.execute(select(Job).where(Job.id == job_id)).scalar_one()

    def wait(self, job_id: str, *wanted: str) -> Job:
        def look() -> Job | None:
            job = self.job(job_id)
            return job if job.status in wanted else None

        return wait_for(
            look, 200, f"{job_id} {wanted}", lambda: f"{self.job(job_id).status}: {self.job(job_id).reason}"
        )

    def wait_for_steps(self, job_id: str) -> int:
        """The trainer's process, once it trains."""
        wait_for(lambda: (self.job(job_id).progress or {}).get("step"), 200, "a step", lambda: self.job(job_id).reason)
        pid = self.child(job_id)
        assert pid is not None
        return pid

    def child(self, job_id: str) -> int | None:
        """The process of its last attempt."""
        with self.database.read() as session:
            query = select(Attempt.pid).where(Attempt.job_id == job_id).order_by(Attempt.attempt.desc()).limit(1)
            return session.execute(query).scalar_one()

    def statuses(self, job_id: str) -> list[str]:
        with self.database.read() as session:
            query = select(Event.data).where(Event.job_id == job_id, Event.type == "status").order_by(Event.seq)
            return [data["to"] for data in session.execute(query).scalars()]


@pytest.fixture
def box(tmp_path: Path, data: Path, models: Path, forks: SharedForks) -> Iterator[Box]:
    box = Box(tmp_path, data, models, forks)
    yield box
    for agent in box.agents:
        agent.stop()
    box.database.dispose()
    data.rename(tmp_path / "data")


@pytest.fixture
def serving(box: Box) -> Iterator[Callable[[Agent], threading.Thread]]:
    """Let an agent work in a thread, as the pool does."""
    threads = []

    def serve(agent: Agent) -> threading.Thread:
        thread = threading.Thread(target=agent.serve)
        thread.start()
        threads.append(thread)
        return thread

    yield serve
    for agent in box.agents:
        agent.stop()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    box.agents.clear()


# -- what it refuses


def test_another_schema(box: Box) -> None:
    with pytest.raises(node.Refused, match=r"is missing.*run `eft migrate`"):
        Agent(box.settings)


def test_a_second_worker_of_the_same_name(box: Box) -> None:
    box.migrate()
    box.agent()
    with pytest.raises(node.Refused, match=rf"process {os.getpid()}\) serves node `box` already.*EFT_NODE"):
        Agent(box.settings)
    other = Agent(box.settings.model_copy(update={"node": "box-2"}))
    box.agents.append(other)


def test_a_disk_without_what_the_api_wrote(box: Box) -> None:
    box.migrate()
    file_id = new_id("file")
    row = {"filename": "a.jsonl", "bytes": 1, "sha256": "0" * 64, "rows": 1, "format": "text"}
    with box.database.write() as session:
        session.execute(insert(File).values(id=file_id, owner_id=ADA.user_id, project_id=ADA.project_id, **row))
    with pytest.raises(node.Refused, match=f"{file_id}.*another disk.*EFT_DATA"):
        Agent(box.settings)
    box.layout.file(file_id).write_text("{}\n")
    (box.layout.root / "nodes").mkdir()
    (box.layout.root / "nodes" / "box.probe").write_bytes(b"of a worker that was killed here")
    box.agent(start=False)
    assert [path.name for path in (box.layout.root / "nodes").iterdir()] == ["box.lock"]


# -- what it runs


def test_it_prepares_and_trains_and_frees_the_slots(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eft.worker")
    box.migrate()
    job_id = box.submit()
    agent = box.agent()
    agent.serve()  # comes back when there is nothing more to do
    told = [line for line in caplog.messages if job_id in line]
    assert len(told) == 4 and all(f"{job_id} [{ADA.request_id}]" in line for line in told), told
    job = box.job(job_id)
    assert job.status == "succeeded", job.reason
    assert box.statuses(job_id) == ["queued", "preparing", "queued", "starting", "running", "succeeded"]
    with box.database.read() as session:
        assert session.execute(select(Allocation.slot).where(Allocation.released_at.is_(None))).all() == []
        steps = session.execute(select(Metric.step).where(Metric.name == "loss").order_by(Metric.step)).scalars().all()
        attempts = session.execute(select(Attempt).order_by(Attempt.attempt)).scalars().all()
    assert steps == [1, 2, 3, 4]
    assert [(a.kind, a.slot, a.exit_code) for a in attempts] == [("prepare", "prepare-0", 0), ("train", "cpu", 0)]
    assert attempts[1].run_record is not None
    assert attempts[1].run_record["selftest"]["key"] == selftest.verdict().key, "known from an earlier start"
    assert attempts[1].run_record["environment"]["attention"] == {"kernels": ["flash", "math"]}
    assert attempts[1].events_offset == (box.layout.attempt(job_id, 2) / "events.jsonl").stat().st_size


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "/etc"}, "model.path"),
        ({"data": "file-0123456789abcdefghjkmnpqrs"}, "data.train.id"),
        ({"data": "/etc/passwd"}, "data.train.path"),
    ],
)
def test_what_a_user_asked_wrongly_fails_with_the_field(box: Box, change: dict[str, Any], field: str) -> None:
    box.migrate()
    job_id = box.submit(**change)
    box.agent().serve()
    job = box.job(job_id)
    assert job.status == "failed"
    assert job.failure is not None
    assert (job.failure["class"], job.failure["field"]) == ("user", field)


def test_a_link_out_of_the_data_roots_is_not_followed(box: Box) -> None:
    box.migrate()
    (box.rows / "link.jsonl").symlink_to("/etc/passwd")
    job_id = box.submit(data=str(box.rows / "link.jsonl"))
    box.agent().serve()
    assert (box.job(job_id).failure or {})["field"] == "data.train.path"


def test_a_model_that_vanished_is_prepared_again(box: Box) -> None:
    box.migrate()
    job_id = box.submit()
    agent = box.agent()
    with box.database.write() as session:
        session.execute(update(Job).values(prepared={"model_dir": str(box.settings.root / "models" / "gone")}))
    agent.serve()
    assert box.job(job_id).status == "queued"
    assert box.job(job_id).prepared is None


# -- what it loses


def test_a_lost_lease_ends_the_trainer_at_once(box: Box, serving: Callable[[Agent], threading.Thread]) -> None:
    box.migrate()
    box.settings = box.settings.model_copy(update={"lease_seconds": 400, "fence_seconds": 300})
    job_id = box.long()
    serving(box.agent())
    pid = box.wait_for_steps(job_id)
    with box.database.write() as session:  # as another node's reaper and claim would
        session.execute(update(Job).values(lease_until=db_now() - 1))
        lease_expiry.reap(session, LossPolicy())
        assert claims.claim(session, "worker-else", "elsewhere", Slot("cpu", "cpu"), 600) is not None
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 200, "the trainer's end")  # which its fence is not
    time.sleep(0.3)
    job = box.job(job_id)
    assert (job.status, job.worker) == ("starting", "worker-else"), "the loser wrote nothing"


def test_a_worker_without_database_lets_its_children_end(
    box: Box, serving: Callable[[Agent], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database locked by somebody else for longer than the fence: no renewal, so no heartbeat, so no child. This
    one waits for a hub that has fallen silent, which takes no processor time."""
    box.migrate()
    box.settings = box.settings.model_copy(update={"lease_seconds": 20, "fence_seconds": 5})
    with hub.serving() as there:
        there.trickle = hub.FIRST
        monkeypatch.setenv("HF_ENDPOINT", there.url)
        job_id = box.submit(model={"type": "hub", "id": there.repo})
        serving(box.agent())
        assert there.flowing.wait(200), box.job(job_id).reason
        pid = wait_for(lambda: box.child(job_id), 60, "its number")
        with box.database.write() as session:
            session.execute(update(Job).values(name="locked"))
            began = time.monotonic()
            wait_for(lambda: not Path(f"/proc/{pid}").exists() or _zombie(pid), 60, "the child's end")
            assert time.monotonic() - began < box.settings.lease_seconds
    log = (box.layout.attempt(job_id, 1) / "log.txt").read_text()
    assert "fenced: no heartbeat" in log


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # reaped since it was looked for
        return True


def test_a_worker_that_slept_before_it_spawned_trains_nothing(box: Box) -> None:
    """Frozen between its claim and the child's start until somebody else had the job: no second trainer."""
    box.migrate()
    job_id = box.submit()
    agent = box.agent(start=False)
    with box.database.write() as session:
        session.execute(update(Job).values(prepared={"model_dir": str(box.model)}))
        stale = claims.claim(session, agent.worker, "box", Slot("cpu", "cpu"), -1)
        assert stale is not None
    with box.database.write() as session:
        lease_expiry.reap(session, LossPolicy())
    with box.database.write() as session:
        assert claims.claim(session, "worker-else", "elsewhere", Slot("cpu", "cpu"), 60) is not None
    attempt = AttemptRunner(agent.site, stale, time.clock_gettime(time.CLOCK_BOOTTIME) - 10)
    attempt.run()
    folder = box.layout.attempt(job_id, 1)
    assert attempt.lost.is_set()
    assert not (folder / "events.jsonl").exists()
    job = box.job(job_id)
    assert (job.status, job.worker, job.attempt) == ("starting", "worker-else", 2)


# -- what it hands back


def test_leaving_hands_back_what_runs(box: Box, serving: Callable[[Agent], threading.Thread]) -> None:
    """A trainer with the variables that its device's self-test asks for."""
    selftest.lay(box.settings.root, "box", environment={"TORCH_BLAS_PREFER_HIPBLASLT": "0"})
    box.migrate()
    job_id = box.long()
    agent = box.agent()
    serving(agent)
    pid = box.wait_for_steps(job_id)
    assert b"TORCH_BLAS_PREFER_HIPBLASLT=0" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    agent.stop()
    box.agents.clear()
    assert not Path(f"/proc/{pid}").exists()
    job = box.job(job_id)
    assert (job.status, job.reason) == ("queued", "waits to continue: worker on box is leaving")
    assert list((box.layout.attempt(job_id, 1) / "checkpoints").glob("step-*")), "it left a checkpoint"


def half_a_checkpoint(folder: Path) -> Path:
    """As a trainer leaves it that is killed while it writes."""
    unfinished = folder / "checkpoints" / "tmp-step-00000008-4711"
    unfinished.mkdir(parents=True)
    (unfinished / "optimizer.safetensors").write_bytes(b"half")
    return unfinished


def test_people_take_the_slot_and_give_it_back(box: Box, serving: Callable[[Agent], threading.Thread]) -> None:
    """A hold with `now`, then a maintenance that begins: both times the trainer saves and its job goes on by itself."""
    box.migrate()
    box.settings = box.settings.model_copy(update={"sweep_seconds": 0.5})
    job_id = box.long()
    agent = box.agent()
    working = serving(agent)
    box.wait_for_steps(job_id)
    with box.database.write() as session:
        holds.hold(session, ADA, ["box/cpu"], held_for="bob", why="notebook", now=True)
    assert box.wait(job_id, "queued").reason == "waits to continue: slot cpu of box is held"
    working.join(120)
    assert box.statuses(job_id)[-3:] == ["starting", "running", "queued"], "and it was not claimed again"
    with box.database.write() as session:
        holds.release(session, ADA, ["cpu"])
    working = serving(agent)
    box.wait(job_id, "running")
    now = box.database.now()
    with box.database.write() as session:
        maintenance.plan(session, ADA, "box", now - 1, now + 3600, "new fans")
    wait_for(
        lambda: box.job(job_id).reason == "waits to continue: the maintenance of box begins", 200, "the maintenance"
    )
    working.join(120)
    job = box.job(job_id)
    assert (job.machine_failures, job.losses, job.stop_requested) == (0, 0, None)
    with box.database.write() as session:
        cancel(session, ADA, job_id)

    def charged() -> float:
        with box.database.read() as session:
            return session.execute(select(func.sum(UsageDay.cpu_seconds))).scalar_one() or 0.0

    assert wait_for(charged, 90, "the books") > 0.2


def test_half_a_checkpoint_goes_with_its_trainer(box: Box, serving: Callable[[Agent], threading.Thread]) -> None:
    box.migrate()
    job_id = box.long()
    serving(box.agent())
    pid = box.wait_for_steps(job_id)
    unfinished = half_a_checkpoint(box.layout.attempt(job_id, 1))
    os.kill(pid, signal.SIGKILL)
    box.wait(job_id, "queued")
    assert not unfinished.exists()


def test_half_a_checkpoint_goes_with_its_lease(box: Box) -> None:
    """Its worker was on another node, which does not come back."""
    box.migrate()
    job_id = box.submit()
    with box.database.write() as session:
        assert claims.claim(session, "worker-gone", "elsewhere", Slot("prepare-0", "prepare"), -1) is not None
    unfinished = half_a_checkpoint(box.layout.attempt(job_id, 1))
    box.agent()
    box.wait(job_id, "queued")
    wait_for(lambda: not unfinished.exists(), 60, "the housekeeper to clear it away")


def test_the_next_worker_of_the_node_ends_what_the_last_one_left(box: Box) -> None:
    """The last worker's row says it runs a trainer; that trainer, here one that ignores SIGTERM, is still there."""
    box.migrate()
    job_id = box.submit()
    with box.database.write() as session:
        session.execute(update(Job).values(prepared={"model_dir": str(box.model)}))
        claim = claims.claim(session, "worker-last", "box", Slot("cpu", "cpu"), 600)
    assert claim is not None
    folder = box.layout.attempt(job_id, 1)
    unfinished = half_a_checkpoint(folder)
    command = [sys.executable, "-m", "tests.support.stubborn", str(folder)]
    with subprocess.Popen(command, cwd=HOME, start_new_session=True, stdout=subprocess.DEVNULL) as left:
        wait_for((folder / "ready").exists, 90, "the helper")
        box.agent()
        assert left.wait(60) == -signal.SIGKILL
    assert not unfinished.exists()
    assert box.statuses(job_id) == ["queued", "starting", "queued"]
    with box.database.read() as session:
        outcome = session.execute(select(Attempt.outcome).where(Attempt.attempt == 1)).scalar_one()
    assert outcome == "the worker on box ended without handing it back"


# -- several CPU slots


def test_cpu_slots_run_side_by_side_and_cancel_ends_the_trainer_then_the_job(
    box: Box, serving: Callable[[Agent], threading.Thread]
) -> None:
    box.migrate()
    box.settings = box.settings.model_copy(update={"cpu_slots": 2})
    first, second = box.long(), box.long()
    agent = box.agent()
    assert [slot.id for slot in agent.slots] == ["cpu-0", "cpu-1", "prepare-0", "preview-0", "export-0"]
    for _ in range(2):
        serving(agent)
    pids = {box.wait_for_steps(first), box.wait_for_steps(second)}
    assert len(pids) == 2
    with box.database.read() as session:
        held = session.execute(select(Allocation.slot).where(Allocation.released_at.is_(None))).scalars()
        assert sorted(held) == ["cpu-0", "cpu-1"]
    pid = box.wait_for_steps(first)
    with box.database.write() as session:
        cancel(session, ADA, first)
    box.wait(first, "cancelled")
    assert not Path(f"/proc/{pid}").exists()
    assert box.statuses(first)[-3:] == ["running", "stopping", "cancelled"]
    with box.database.read() as session:
        held = session.execute(select(Allocation.slot).where(Allocation.released_at.is_(None))).scalars()
        assert len(list(held)) == 1


@pytest.mark.parametrize(("cores", "slots", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_cpu_slots_share_the_cores_evenly(
    monkeypatch: pytest.MonkeyPatch, box: Box, cores: int, slots: int, threads: int
) -> None:
    box.migrate()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    box.settings = box.settings.model_copy(update={"cpu_slots": slots})
    assert box.agent(start=False).site.threads == threads


def test_a_claim_that_it_did_not_hear_of_is_handed_back(box: Box) -> None:
    """As when the database is killed between the commit of a claim and its answer."""
    box.migrate()
    job_id = box.submit()
    agent = box.agent()
    with box.database.write() as session:
        session.execute(update(Job).values(prepared={"model_dir": str(box.model)}))
        assert claims.claim(session, agent.worker, "box", Slot("cpu", "cpu"), 600) is not None
    after = box.submit()
    agent.claims.unheard = True
    agent.serve()
    assert [box.job(name).status for name in (job_id, after)] == ["succeeded", "succeeded"]
    assert box.statuses(job_id) == ["queued", "starting", "queued", "starting", "running", "succeeded"]
