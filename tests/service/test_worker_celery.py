"""A real `celery -A worker.app worker`, without one flag: what it serves, how it is set, what it imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from sqlalchemy import select

from box import broker
from core import HOME
from core.db.engine import Database
from core.db.tables import Node
from core.settings import Settings
from tests.support import forks, migrated
from tests.support.hardware import unpack
from tests.support.service import wait_for

GPUS = 4


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A data root with database and broker, and a box with eight GPUs as a file tree."""
    unpack("mi300x-8", tmp_path / "box")
    settings = Settings(data=tmp_path / "data")
    settings.root.mkdir()
    migrated.lay(settings.root / "eft.db")
    broker.prepare(settings.root / "broker", settings.broker_socket)
    with (tmp_path / "broker.log").open("wb") as log:
        server = subprocess.Popen(
            broker.command(settings.root / "broker", settings.broker_socket), stdout=log, stderr=log
        )
    wait_for(lambda: broker.answers(settings.broker_socket), 60, "the broker")
    yield {
        **{name: value for name, value in os.environ.items() if not name.startswith("EFT_")},
        "EFT_DATA": str(settings.root),
        "EFT_NODE": "made-up",
        "EFT_SYSFS": str(tmp_path / "box" / "sys"),
        "EFT_SELFTEST_SECONDS": "0",  # there are no such cards
        "EFT_SPARE": "0",  # no job comes: nothing here waits for torch
    }
    server.terminate()
    server.wait(60)


class StartedWorker:
    """`python -m WORDS`, or a fork of what has its imports, and what it says."""

    def __init__(self, environment: dict[str, str], *words: str, cold: bool = False) -> None:
        self.log = Path(environment["EFT_DATA"]).parent / f"{len(words)}-{time.monotonic_ns()}.log"
        start = forks.start_cold if cold else forks.start
        with self.log.open("wb") as log:
            self.process = start(*words, environment=environment, log=log.fileno())

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(120)

    def leave(self) -> str:
        """What it has said, to its last word."""
        self.process.send_signal(signal.SIGTERM)
        assert self.end() == 0, self.said
        return self.said


def slots(environment: dict[str, str]) -> list[dict[str, Any]]:
    database = Database(Settings(data=Path(environment["EFT_DATA"])).sqlalchemy_url)

    def look() -> list[Any] | None:
        with database.read() as session:
            return session.execute(select(Node.slots).where(Node.name == "made-up")).scalar_one_or_none()

    try:
        return wait_for(look, 150, "the node's row")
    finally:
        database.dispose()


def test_a_bare_celery_worker_under_an_inherited_mask_serves_that_gpu_alone(environment: dict[str, str]) -> None:
    masked = environment | {"HIP_VISIBLE_DEVICES": "2"}
    worker = StartedWorker(masked, "celery", "-A", "worker.app", "worker", "-l", "INFO", cold=True)
    try:
        gpu, prepare, preview, export = slots(environment)
        assert (gpu["kind"], gpu["gpu"]["index"], gpu["id"]) == ("gpu", 2, gpu["gpu"]["uuid"])
        assert (prepare["kind"], prepare["id"]) == ("prepare", "prepare-0")
        assert (preview["kind"], preview["id"]) == ("preview", "preview-0")
        assert (export["kind"], export["id"]) == ("export", "export-0")
        where = Settings(data=Path(environment["EFT_DATA"])).celery_broker_url
        with Celery("asks", broker=where, set_as_current=False) as app:
            stats = wait_for(lambda: app.control.inspect(limit=1, timeout=5).stats(), 150, "stats")
        (pool,) = [one["pool"] for one in stats.values()]
        assert pool["max-concurrency"] == 4, "a thread a slot"
        assert pool["implementation"].endswith("thread:TaskPool")
        # What the process has mapped: neither torch nor a ROCm library.
        maps = Path(f"/proc/{worker.process.pid}/maps").read_text()
        assert "/torch/" not in maps
        assert "libamdhip" not in maps
    finally:
        output = worker.leave()
    assert "mingle" not in output
    assert "Traceback" not in output


def test_chosen_gpus_and_a_second_worker(environment: dict[str, str]) -> None:
    first = StartedWorker(environment, "worker", "--gpus", "5,1")
    try:
        assert [slot["gpu"]["index"] for slot in slots(environment) if slot["kind"] == "gpu"] == [5, 1]
        second = StartedWorker(environment, "worker")
        assert second.end() == 78
        assert f"another worker (process {first.process.pid}) serves node `made-up` already" in second.said
        assert "Traceback" not in second.said
    finally:
        first.leave()


def test_a_gpu_that_is_not_there(environment: dict[str, str]) -> None:
    worker = StartedWorker(environment, "worker", "--gpus", "8")
    assert worker.end() == 78
    assert "--gpus names GPU 8, which is not there" in worker.said
    assert "Traceback" not in worker.said


def test_a_broker_that_cannot_be_reached_is_said_with_its_setting(environment: dict[str, str]) -> None:
    """At the start, and each time that Celery tries again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}/0"
        worker = StartedWorker(environment | {"EFT_BROKER_URL": f"redis://{where}"}, "worker")
        wait_for(lambda: "ERROR" in worker.said, 120, "an error", lambda: worker.said)
    worker.process.terminate()
    worker.end()
    lines = worker.said.splitlines()
    first = next(number for number, line in enumerate(lines) if "ERROR" in line)
    assert any("the broker at EFT_BROKER_URL does not answer yet" in line for line in lines[:first])
    words = "the broker at EFT_BROKER_URL cannot be reached, "
    assert words in lines[first] and where in lines[first], worker.said


def test_no_module_of_the_worker_imports_torch() -> None:
    modules = [f"worker.{path.stem}" for path in (HOME / "worker").glob("[a-z]*.py")]
    check = (
        f"import sys, {', '.join(sorted(modules))}\n"
        "sys.exit(bool({'torch', 'transformers', 'core.train'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", check], cwd=HOME, check=True)


def test_the_settings_that_were_measured() -> None:
    from worker.app import app

    conf = app.conf
    assert not conf.task_acks_late
    assert conf.worker_prefetch_multiplier == 1
    assert conf.worker_disable_prefetch
    assert conf.task_ignore_result
    assert not conf.task_publish_retry
    assert not conf.worker_cancel_long_running_tasks_on_connection_loss
    assert conf.broker_connection_retry_on_startup
    assert conf.broker_connection_max_retries is None
    assert conf.worker_pool == "threads"
    assert conf.result_backend is None
    expected = {"visibility_timeout": 3600, "unacked_restore_interval": 10, "unacked_restore_throttle": 1}
    expected |= {
        "socket_timeout": 10,
        "socket_connect_timeout": 5,
        "socket_keepalive": True,
        "health_check_interval": 10,
    }
    assert expected.items() <= conf.broker_transport_options.items()
    assert [name for name in app.tasks if not name.startswith("celery.")] == [
        "eft.wake"
    ] or "worker.tasks" in conf.include


def test_what_is_no_message_is_dropped(environment: dict[str, str]) -> None:
    worker = StartedWorker(environment | {"EFT_SYSFS": "/sys", "EFT_GPUS": ""}, "worker")
    try:
        broken = ["not json", "5", "{}", '{"body": 5, "properties": {}}', '"text"', "[1]", b"\xff\xfe"]
        with redis.Redis(unix_socket_path=str(Settings(data=Path(environment["EFT_DATA"])).broker_socket)) as client:
            for one in broken:
                client.lpush("eft", one)
            wait_for(lambda: client.llen("eft") == 0 or worker.process.poll() is not None, 120, "all of them heard")
            client.lpush("eft", "not json either")
            wait_for(lambda: client.llen("eft") == 0 or worker.process.poll() is not None, 120, "one more")
        assert worker.process.poll() is None
    finally:
        told = worker.leave()
    assert told.count("is not a message") >= len(broken) - 2, told
