"""`python -m box.up`: one service on a data root, kept up, and nothing left of it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from box import broker
from core import HOME
from core.settings import MAX_SOCKET_PATH, Settings
from tests.support.service import Service, running, wait_for

SECRETS = {
    "HF_TOKEN": "hf_hunter2",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "EFT_API_KEY": "eft_hunter2",
    "HTTPS_PROXY": "http://user:hunter2@127.0.0.1:9",
}
MASKS = {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"}

BROKER_AWAY = float(os.environ.get("EFT_TEST_BROKER_AWAY", "2"))
"""Seconds that the broker does not answer. Minutes of it are tried by hand: EFT_TEST_BROKER_AWAY=130."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    """With the tiny model, and what tests put beside it."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_dir, folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Service]:
    """For the tests that leave it up, started as a user starts it."""
    folder = tmp_path_factory.mktemp("up")
    (folder / "data").mkdir(mode=0o755)  # as an administrator makes one
    (folder / "data").chmod(0o755)
    yield from running(folder, {"EFT_MODEL_ROOTS": str(models), **SECRETS}, cold=True)


@pytest.fixture
def own(tmp_path: Path, models: Path) -> Iterator[Service]:
    """For the tests that end it."""
    yield from running(tmp_path, {"EFT_MODEL_ROOTS": str(models)})


def long_job(service: Service, models: Path) -> str:
    rows = service.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(32)))
    spec: dict[str, Any] = {
        "model": str(models / "tiny"),
        "data": service.upload(rows),
        "training": {"max_steps": 100_000, "per_device_train_batch_size": 2, "max_length": 64},
    }
    return service.submit(spec)


def test_ready_means_ready(service: Service) -> None:
    note = service.note()
    assert set(note["pids"]) == {"up", "broker", "api", "worker"}
    assert stat.S_IMODE((service.data / "up.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((service.folder / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE(service.data.stat().st_mode) == 0o700
    for name in ("api", "worker"):
        command = Path(f"/proc/{note['pids'][name]}/cmdline").read_bytes()
        assert len(command) > 1024 and command.rstrip(b"\0") == os.fsencode(f"{sys.executable}\0-m\0{name}"), "forked"
    assert b"hf_hunter2" not in Path(f"/proc/{note['pids']['api']}/environ").read_bytes()
    assert f"is up at {note['url']}" in service.log()
    assert service.key.startswith("eft_")
    assert service.key not in service.log()
    assert service.client.get("/jobs").status_code == 200
    me = service.client.get("/me").json()
    assert (me["role"], me["scope"], me["box_admin"]) == ("admin", "box", True), "the first key is that of the box"
    assert service.client.get("/jobs", headers={"Authorization": "Bearer eft_wrong"}).status_code == 401


def test_a_second_one_on_the_same_data_root_is_refused(service: Service) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "box.up", "--port", "0"],
        cwd=HOME,
        env=service.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert second.returncode == 1
    assert f"already up on the data root {service.data} (process {service.pid('up')})" in second.stderr
    assert "Traceback" not in second.stderr
    assert service.client.get("/healthz").status_code == 200, "the first one does not mind"


def test_a_trainers_environment_holds_no_secret_and_one_filter(service: Service, models: Path) -> None:
    job_id = long_job(service, models)
    service.wait_for_step(job_id, 1)
    (trainer,) = service.trainers(job_id)
    raw = Path(f"/proc/{trainer}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in raw if entry)
    assert "hunter2" not in str(environment)
    assert service.key not in str(environment)
    assert not [name for name in environment if name.startswith("EFT_")]
    assert {name: environment[name] for name in MASKS & set(environment)} == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "1"

    opened = {os.readlink(entry) for entry in Path(f"/proc/{trainer}/fd").iterdir()}
    assert not [name for name in opened if name.startswith("socket:") or name.endswith((".db", ".lock"))], opened
    assert "/torch/" in Path(f"/proc/{trainer}/maps").read_text()
    assert "/torch/" not in Path(f"/proc/{service.pid('worker')}/maps").read_text()
    assert "/torch/" not in Path(f"/proc/{service.pid('api')}/maps").read_text()

    service.client.post(f"/jobs/{job_id}/cancel")
    service.wait(job_id, "cancelled")
    assert service.trainers() == []


def test_nothing_in_the_data_root_is_for_others(service: Service) -> None:
    """A job has been there: API, worker, broker and trainer have all made something."""
    assert "was open to other users of this box (mode 755)" in service.log()
    seen = [path for path in service.data.rglob("*") if not path.is_symlink()]
    assert {"eft.db", "runs", "logs", "broker"} <= {path.name for path in seen}
    assert {"run.json", "log.txt"} & {path.name for path in seen}
    assert [(path, oct(path.stat().st_mode)) for path in seen if path.exists() and path.stat().st_mode & 0o077] == []


def test_a_killed_broker_comes_back_and_no_job_waits_for_ever(service: Service, models: Path) -> None:
    old = service.pid("broker")
    os.kill(old, signal.SIGKILL)
    (models / "empty").mkdir()
    job_id = service.submit({"model": str(models / "empty"), "data": service.upload(rows_of(service))})
    failed = service.wait(job_id, "failed")
    assert failed["failure"]["class"] == "user"
    assert service.pid("broker") != old
    assert "the broker ended (exit status -9)" in service.log()


def test_doubled_late_lost_and_stuck_messages_change_nothing(service: Service, models: Path) -> None:
    """Each of a running and of an ended job twenty times; a broker emptied again and again; one that is deaf."""
    (models / "nothing").mkdir()
    nothing = {"model": str(models / "nothing"), "data": service.upload(rows_of(service))}
    ended = service.submit(nothing)
    service.wait(ended, "failed")
    before = service.statuses(ended)
    job_id = long_job(service, models)
    service.wait_for_step(job_id, 2)
    (trainer,) = service.trainers(job_id)
    os.kill(trainer, signal.SIGSTOP)  # it has no need to go on meanwhile; its worker keeps the lease
    path = service.statuses(job_id)
    assert path == ["queued", "preparing", "queued", "starting", "running"]
    server = redis.Redis(unix_socket_path=str(Settings(data=service.data).broker_socket))
    with Celery("rings", broker=Settings(data=service.data).celery_broker_url, set_as_current=False) as rings:
        for job in 20 * (job_id, ended):
            rings.send_task("eft.wake", args=[job], queue="eft")
    wait_for(lambda: server.llen("eft") == 0, 200, "all rings to be heard")
    assert service.statuses(job_id) == path and service.trainers(job_id) == [trainer]
    assert service.statuses(ended) == before

    with server:
        # However long a task is, no copy of it is kept to be delivered again after the visibility timeout.
        assert server.hlen("unacked") == 0 and server.zcard("unacked_index") == 0
        lost = service.submit(nothing)
        for _ in range(20):
            server.flushall()
            time.sleep(0.05)  # for the next message to come
    service.wait(lost, "failed")

    os.kill(service.pid("broker"), signal.SIGSTOP)
    try:
        began = time.monotonic()
        stuck = service.submit(nothing)
        assert time.monotonic() - began < 9, "the API does not ask the broker"
        time.sleep(BROKER_AWAY)
    finally:
        os.kill(service.pid("broker"), signal.SIGCONT)
    service.wait(stuck, "failed")
    assert service.statuses(job_id) == path and service.trainers(job_id) == [trainer]
    os.kill(trainer, signal.SIGCONT)
    service.client.post(f"/jobs/{job_id}/cancel")
    service.wait(job_id, "cancelled")


def rows_of(service: Service) -> Path:
    path = service.folder / "one.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n')
    return path


def test_sigterm_hands_back_and_leaves_nothing_nor_does_kill_9_of_the_supervisor(own: Service, models: Path) -> None:
    job_id = long_job(own, models)
    own.wait_for_step(job_id, 1)
    own.stop()
    assert own.process is not None and own.process.returncode == 0
    assert own.processes() == {}
    assert not (own.data / "up.json").exists()
    with sqlite3.connect(own.data / "eft.db") as database:
        row = database.execute("SELECT status, worker FROM jobs WHERE id = ?", (job_id,)).fetchone()
        held = database.execute("SELECT count(*) FROM allocations WHERE released_at IS NULL").fetchone()
    database.close()
    assert row == ("queued", None)
    assert held == (0,)

    own.start()  # the key is the same, and the job goes on where it was

    def resumed() -> list[Any]:
        events = own.client.get(f"/jobs/{job_id}/events", params={"format": "json"}).json()["data"]
        return [event for event in events if event["type"] == "resumed"]

    assert len(wait_for(resumed, 200, "the job to go on", lambda: own.describe(job_id))) == 1

    # Its supervisor, killed where it stands, leaves nothing either.
    assert len(own.processes()) >= 5, own.processes()
    own.process.kill()
    own.process.wait()
    wait_for(lambda: not own.processes(), 120, "everything to end", lambda: str(own.processes()))


def test_kill_9_of_everything_but_the_trainer_leaves_nothing(own: Service, models: Path) -> None:
    job_id = long_job(own, models)
    own.wait_for_step(job_id, 1)
    for pid in own.note()["pids"].values():
        with contextlib.suppress(ProcessLookupError):  # it has gone with the supervisor
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not own.processes(), 120, "the trainer to end itself", lambda: str(own.processes()))
    assert own.process is not None
    own.process.wait()


def test_a_taken_port_is_told_before_anything_is_made(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = os.environ | {"EFT_DATA": str(tmp_path / "data"), "EFT_NODE": "box"}
        command = [sys.executable, "-m", "box.up", "--port", str(port), "--key-file", str(tmp_path / "key")]
        ended = subprocess.run(command, cwd=HOME, env=environment, capture_output=True, text=True, timeout=280)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"port {port} of 127.0.0.1 is taken by process {os.getpid()} (" in ended.stderr and "--port" in ended.stderr
    assert not (tmp_path / "key").exists() and [one.name for one in (tmp_path / "data").iterdir()] == ["up.lock"]


# -- the broker's socket


@pytest.mark.parametrize("runtime", ["/run/user/1000", "/" + "z" * 90, ""])
def test_a_long_data_root_gets_a_short_socket(runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    short = Settings(data=Path("/data"))
    assert short.broker_socket == Path("/data/broker/valkey.sock")
    long = Settings(data=Path("/data") / ("x" * 100))
    assert len(os.fsencode(long.broker_socket)) <= MAX_SOCKET_PATH
    assert long.broker_socket != Settings(data=Path("/data") / ("y" * 100)).broker_socket
    assert long.celery_broker_url == f"redis+socket://{long.broker_socket}"


def test_a_socket_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "eft-0"
    folder.mkdir(mode=0o755)
    with pytest.raises(broker.UnsafeFolder, match="0700"):
        broker.prepare(tmp_path / "data", folder / "valkey.sock")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(broker.UnsafeFolder):
        broker.prepare(tmp_path / "data", tmp_path / "link" / "valkey.sock")


def test_the_broker_runs_on_such_a_socket_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    data, path = tmp_path / "broker", tmp_path / "run" / "valkey.sock"
    for expected in (b"$-1", b"$4\r\nkept"):
        broker.prepare(data, path)
        server = subprocess.Popen(broker.command(data, path), stdout=subprocess.DEVNULL)
        wait_for(lambda: broker.answers(path), 60, "the broker")
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"GET word\r\n")
            assert connection.recv(100).startswith(expected)
            connection.sendall(b"SET word kept\r\n")
            assert connection.recv(100) == b"+OK\r\n"
            wait_for(lambda: b"kept" in b"".join(f.read_bytes() for f in data.glob("**/*.aof")), 60, "the log file")
        server.kill()
        server.wait()
