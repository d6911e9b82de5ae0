"""The fork server: when it is there, what its children may have, and whose end ends it. That a forked child is a cold
one to the bit is for test_worker_starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.jobs.kinds import CHILDREN, Kind
from core.spec.axes.model import HubModel
from core.spec.run.exit_codes import EXIT_FENCED
from core.spec.run.orders import PrepareOrder
from core.spec.run.standby import OFFLINE, STANDBY_PADDING
from core.train.entry.fencing import boottime
from tests.support import hub, trainer
from tests.support.service import Service, running, wait_for
from tests.support.starts import TRAINER, finish, fork, forking, pid_of, write_run
from worker import processes
from worker.attempt import fork_server
from worker.attempt.child import write_order
from worker.environment import child_environment

HUB_MODEL = HubModel(id="team/tiny")


def preparation(folder: Path, *, fence: float = 60.0) -> Path:
    """A run folder whose child brings the hub's model into `models` beside it."""
    models = str(folder.parent / "models")
    write_order(folder, PrepareOrder(job_id="job", attempt=1, model=HUB_MODEL, models_dir=models, fence_seconds=fence))
    return folder


@pytest.mark.usefixtures("forked")
def test_a_child_outlives_its_server_and_silence_ends_it(tmp_path: Path) -> None:
    """It waits for a hub that has fallen silent too, and so takes no processor time."""
    with hub.serving() as there:
        there.trickle = hub.FIRST
        settings = os.environ | {"HF_ENDPOINT": there.url}
        environment = child_environment(Kind.PREPARE, gpu=None, threads=1, root=tmp_path, inherited=settings)
        folder = preparation(tmp_path / "run", fence=8.0)
        with forking(child_environment(Kind.TRAIN, gpu=None, threads=1, root=tmp_path)) as server:
            child = fork(server, folder, environment, CHILDREN[Kind.PREPARE].module)
            os.kill(pid_of(server), signal.SIGKILL)
            wait_for(lambda: not server.ready, 60, "its end")
            assert server.fork(folder, TRAINER, environment) is None, "another comes later; until then jobs start cold"
            server.await_ready(lambda seconds: pytest.fail("nothing comes now that is worth waiting for"))
            while not there.flowing.is_set():
                child.beat(boottime())
                assert not child.exited(0.1), trainer.log(folder)
            assert child.exited(55)
            assert child.reap() == EXIT_FENCED
    assert "fenced: no heartbeat" in trainer.log(folder)


@pytest.mark.usefixtures("forked")
def test_one_that_is_not_kept_comes_with_the_first_child_and_ends_after_the_last(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = child_environment(Kind.TRAIN, gpu=None, threads=1, root=tmp_path)
    folder = write_run(tmp_path / "run", tiny_dir, steps=100_000)
    with forking(environment, keep=False) as server:
        threading.Event().wait(1.0)
        assert server._spare is None
        child = fork(server, folder, environment)
        monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0.0)
        wait_for(lambda: server._spare is None, 60, "its end")
        assert not child.exited(0.0)
        child.kill()
        assert child.reap() == -signal.SIGKILL


@pytest.mark.usefixtures("forked")
def test_a_model_is_brought_from_the_hub_by_a_fork_of_what_is_kept_from_it(tmp_path: Path) -> None:
    """Its libraries were imported without a network and without the token."""
    of_trainers = child_environment(Kind.TRAIN, gpu=None, threads=1, root=tmp_path)
    with hub.serving() as there:
        there.secret = "hf_hunter2"
        settings = os.environ | {"HF_ENDPOINT": there.url, "HF_TOKEN": there.secret}
        environment = child_environment(Kind.PREPARE, gpu=None, threads=1, root=tmp_path, inherited=settings)
        assert not environment.keys() & set(OFFLINE)
        with forking(of_trainers) as server:
            folder = preparation(tmp_path / "run")
            child = fork(server, folder, environment, CHILDREN[Kind.PREPARE].module)
            assert finish(child) == 0, trainer.log(folder)
            (result,) = trainer.events(folder, "result")
            assert Path(result["result"]["model_dir"], "config.json").is_file()
            assert b"hunter2" not in Path(f"/proc/{pid_of(server)}/environ").read_bytes()


@pytest.fixture
def service(models: Path, tmp_path: Path) -> Iterator[Service]:
    secrets = {"EFT_API_KEY": "hunter2", "HF_TOKEN": "hunter2"}
    yield from running(tmp_path, {"EFT_SPARE": "1", "EFT_MODEL_ROOTS": str(models), **secrets})


def test_a_whole_service_forks_its_trainers_and_all_end_with_their_worker(service: Service, tiny_dir: Path) -> None:
    rows = trainer.write_rows(service.folder / "rows.jsonl", trainer.pairs(16))
    training = {"max_steps": 100_000, "per_device_train_batch_size": 2, "max_length": 64}
    (server,) = wait_for(service.spares, 200, "a fork server", service.log)
    environment = Path(f"/proc/{server}/environ").read_bytes()
    assert b"hunter2" not in environment and b"EFT_" not in environment
    job_id = service.submit({"model": str(tiny_dir), "data": service.upload(rows), "training": training})
    (pid,) = wait_for(lambda: service.trainers(job_id), 200, "the trainer", lambda: service.describe(job_id))
    service.wait_for_step(job_id, 1)
    seen = processes.look(pid)
    assert seen is not None and seen.parent == service.pid("worker")
    assert len(Path(f"/proc/{pid}/cmdline").read_bytes()) > STANDBY_PADDING, "it was forked"
    assert service.spares() == [server]
    os.kill(service.pid("worker"), signal.SIGKILL)
    for one in (server, pid):
        wait_for(lambda one=one: not (look := processes.look(one)) or not look.alive, 60, "its end")
