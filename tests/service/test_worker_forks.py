"""The fork server: what a forked child is, that its result is the cold one's to the bit, and whose end ends it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.jobs.kinds import CHILDREN, Kind
from core.spec.axes.model import HubModel
from core.spec.run.exit_codes import EXIT_FENCED
from core.spec.run.orders import PrepareOrder
from core.spec.run.standby import OFFLINE, STANDBY_PADDING
from core.train.entry.fencing import boottime
from tests.support import hub, trainer
from tests.support.service import Service, running, wait_for
from worker import processes
from worker.attempt import fork_server
from worker.attempt.child import Child, write_order
from worker.attempt.fork_server import ForkServer
from worker.environment import child_environment

TRAINER = "core.train"


@contextmanager
def forking(environment: dict[str, str], *, keep: bool = True) -> Iterator[ForkServer]:
    server = ForkServer(environment, lambda: False, keep=keep)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(90)
        assert not thread.is_alive()


def write_run(folder: Path, model: Path, *, steps: int = 3, fence: float = 60.0, **axes: Any) -> Path:
    rows = trainer.write_rows(folder.parent / f"{folder.name}.jsonl", trainer.pairs(24))
    training = {"max_steps": steps, "per_device_train_batch_size": 2, "max_length": 64}
    return trainer.write_run(folder, model, rows, fence_seconds=fence, training=training, **axes)


def fork(server: ForkServer, folder: Path, environment: dict[str, str], module: str = TRAINER) -> Child:
    server.await_ready(lambda seconds: threading.Event().wait(seconds))
    child = server.fork(folder, module, environment)
    assert child is not None
    return child


def finish(child: Child) -> int:
    while not child.exited(1.0):
        child.beat(boottime())
    return child.reap()


def server_of(server: ForkServer) -> int:
    assert server._spare is not None
    return server._spare.pid


def test_a_child_is_the_workers_own_and_ends_as_a_cold_one_to_the_bit(tiny_dir: Path, tmp_path: Path) -> None:
    """With two threads: a parallel region of OpenMP in the server would leave its children hanging."""
    environment = child_environment("train", gpu=None, threads=2, root=tmp_path)
    axes: dict[str, Any] = {"method": {"type": "lora", "lora_dropout": 0.1}}
    first, second, cold = (write_run(tmp_path / name, tiny_dir, **axes) for name in ("first", "second", "cold"))
    with forking(environment) as server:
        children = [fork(server, folder, environment) for folder in (first, second)]
        assert server_of(server) not in [child.pid for child in children]
        for child, folder in zip(children, (first, second), strict=True):
            wait_for(lambda folder=folder: processes.running_in(folder), 60, "its command line")
            seen = processes.look(child.pid)
            assert seen is not None and seen.parent == os.getpid()
            assert (seen.session, seen.group, seen.started) == (child.pid, child.pid, child.started)
            of = Path(f"/proc/{child.pid}")
            words = [os.fsencode(part) for part in (sys.executable, "-m", TRAINER, folder)]
            assert (of / "cmdline").read_bytes().rstrip(b"\0").split(b"\0") == words
            entries = (of / "environ").read_bytes().decode().split("\0")
            assert dict(entry.split("=", 1) for entry in entries if entry) == environment
            assert os.readlink(of / "fd" / "1") == os.readlink(of / "fd" / "2") == str(folder / "log.txt")
        assert [finish(child) for child in children] == [0, 0], trainer.log(first) + trainer.log(second)
        assert "RuntimeWarning" not in trainer.log(first), trainer.log(first)
        assert server.fork(cold, TRAINER, environment | {"OMP_NUM_THREADS": "1"}) is None, "it has another environment"
    assert finish(Child(cold, TRAINER, environment)) == 0, trainer.log(cold)
    assert trainer.weights(first) == trainer.weights(second) == trainer.weights(cold)
    kinds = [
        [event["type"] for event in trainer.events(folder) if event["type"] != "progress"] for folder in (first, cold)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.usefixtures("forked")
def test_a_child_outlives_its_server_and_silence_ends_it(tiny_dir: Path, tmp_path: Path) -> None:
    environment = child_environment("train", gpu=None, threads=1, root=tmp_path)
    folder = write_run(tmp_path / "run", tiny_dir, steps=100_000, fence=8.0)
    with forking(environment) as server:
        child = fork(server, folder, environment)
        os.kill(server_of(server), signal.SIGKILL)
        wait_for(lambda: not server.ready, 60, "its end")
        assert server.fork(folder, TRAINER, environment) is None, "another comes later; until then jobs start cold"
        server.await_ready(lambda seconds: pytest.fail("nothing comes now that is worth waiting for"))
        while not trainer.events(folder, "metrics"):
            child.beat(boottime())
            assert not child.exited(0.1), trainer.log(folder)
        assert child.exited(55)
        assert child.reap() == EXIT_FENCED
    assert "fenced: no heartbeat" in trainer.log(folder)


@pytest.mark.usefixtures("forked")
def test_one_that_is_not_kept_comes_with_the_first_child_and_ends_after_the_last(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = child_environment("train", gpu=None, threads=1, root=tmp_path)
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
    order = PrepareOrder(
        job_id="job", attempt=1, model=HubModel(id="team/tiny"), models_dir=str(tmp_path / "models"), fence_seconds=60.0
    )
    of_trainers = child_environment(Kind.TRAIN, gpu=None, threads=1, root=tmp_path)
    with hub.serving() as there:
        there.secret = "hf_hunter2"
        settings = os.environ | {"HF_ENDPOINT": there.url, "HF_TOKEN": there.secret}
        environment = child_environment(Kind.PREPARE, gpu=None, threads=1, root=tmp_path, inherited=settings)
        assert not environment.keys() & set(OFFLINE)
        with forking(of_trainers) as server:
            write_order(tmp_path / "run", order)
            child = fork(server, tmp_path / "run", environment, CHILDREN[Kind.PREPARE].module)
            assert finish(child) == 0, trainer.log(tmp_path / "run")
            (result,) = trainer.events(tmp_path / "run", "result")
            assert Path(result["result"]["model_dir"], "config.json").is_file()
            assert b"hunter2" not in Path(f"/proc/{server_of(server)}/environ").read_bytes()


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
