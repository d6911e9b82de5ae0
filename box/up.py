"""The whole service on one machine: `python -m box.up` (or `eft up`).

A supervisor of three processes: the embedded broker, the API and one worker. Each in a session of its own, started
again when it ends, and told by the kernel when the supervisor ends. The first SIGTERM or SIGINT stops them in order
(the worker checkpoints its jobs, then the API, then the broker); a second one does not wait.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from box import broker, member_environment, ports
from box.fork_server import MemberForkServer
from box.instance import AlreadyRunning, Instance
from box.process import ManagedProcess
from core import HOME, __version__, command, health, logfile, private
from core.command import EXIT_CONFIG, EXIT_NOT_NOW
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Node
from core.settings import Settings, crosses_in_clear, make_root, read_settings
from core.storage.layout import HalfRestored, Layout

LOOK_SECONDS = 0.1
MAX_FAILURES = 5
SOON_SECONDS = 10.0
"""A process that ends sooner than this after its start has failed to start; or sooner than the first start of all took,
twice over, on a box that is slow; and until all have started once, whenever it ends."""
MAX_BACKOFF_SECONDS = 10.0
READY_SECONDS = 120.0


class GivesUp(Exception):
    """The service cannot be kept up; the message says why."""


class Supervisor:
    """Runs until asked to stop. Keep it free of threads: a member's death signal is tied to its thread."""

    def __init__(self, settings: Settings, instance: Instance, key_file: Path | None) -> None:
        self.settings = settings
        self.layout = Layout(settings.root)
        self.instance = instance
        self.key_file = key_file
        self.url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"
        self.stops = 0
        """Signals to stop so far."""
        self.environment = os.environ | {
            "EFT_DATA": settings.data_root,
            "EFT_WORK": str(settings.root),
            "EFT_HOST": settings.host,
            "EFT_PORT": str(settings.port),
            "EFT_NODE": settings.node,
        }
        self._start_name = secrets.token_hex(8)
        """What the API that is started here says of itself."""
        self.members: list[ManagedProcess] = []
        self._forks: MemberForkServer | None = None
        self._log_look = 0.0
        self._soon = math.inf
        self._since = 0.0
        """This start, by the database's clock."""
        self._slots: list[Any] | None = None

    # -- up

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop_signal)
        try:
            self._database()
            self._forks = MemberForkServer(
                member_environment.of("api", self.environment), self._log_path("fork-server")
            )
            if not self.settings.broker_url:
                self._start_broker()
            self._forks.await_ready(lambda: self.stops > 0)
            key = self._first_key()
            self._start("api", "api")
            self._start("worker", "worker")
            if self._wait_until_ready():
                self._say_ready(key)
            while not self.stops:
                self._look()
                time.sleep(LOOK_SECONDS)
            print("stopping: running jobs write a checkpoint and wait for the next start", flush=True)
            return 0
        except GivesUp as reason:
            print(f"eft: {reason}", file=sys.stderr, flush=True)
            return 1
        finally:
            self._stop()

    def _stop_signal(self, number: int, frame: FrameType | None) -> None:
        self.stops += 1

    def _database(self) -> None:
        try:
            self.layout.create()
        except (HalfRestored, private.OpenDataRoot) as error:
            raise GivesUp(str(error)) from error
        database = Database(self.settings.sqlalchemy_url)
        try:
            migrate.upgrade(database)
            self._since = database.now()
        except migrate.NewerSchema as error:
            raise GivesUp(str(error)) from error
        except SQLAlchemyError as error:
            raise GivesUp(command.database_words(error)) from error
        finally:
            database.dispose()

    def _first_key(self) -> str | None:
        """The key to show: made now, or made by a start that ended before it could show it."""
        path = self.key_file or self.layout.root / "first.key"
        arguments = ["create", "--project", "default", "--user", "admin", "--name", "first", "--if-none", str(path)]
        code, said = self._run("api.auth.keys", arguments)
        if code != 0:
            raise GivesUp(f"no API key could be made:\n{said.strip()}")
        return path.read_text().strip() if self.key_file is None and path.exists() else None

    def _run(self, module: str, arguments: list[str]) -> tuple[int, str]:
        """Exit status and output of a program of the API's that ends by itself."""
        environment = member_environment.of("api", self.environment)
        reader, writer = os.pipe()
        with os.fdopen(reader, encoding="utf-8", errors="replace") as output:
            try:
                forked = self._forks and self._forks.fork(module, arguments, environment, writer, ())
                program = forked or subprocess.Popen(
                    [sys.executable, "-m", module, *arguments],
                    cwd=HOME,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                )
            finally:
                os.close(writer)
            said = output.read()
        return program.wait(), said

    def _start_broker(self) -> None:
        data, path = self.layout.root / "broker", self.settings.broker_socket
        try:
            broker.prepare(data, path)
        except (OSError, broker.UnsafeFolder) as error:
            raise GivesUp(str(error)) from error
        log = self._log_path("broker")
        self._add(
            ManagedProcess(
                "broker", broker.command(data, path, log), member_environment.of("broker", self.environment), data, log
            )
        )
        deadline = time.monotonic() + READY_SECONDS
        while not self.stops and not broker.answers(path):
            if time.monotonic() > deadline:
                raise GivesUp(f"the broker does not answer; its log ends with\n{self.members[-1].tail()}")
            self._look()
            time.sleep(0.02)

    def _start(self, name: str, module: str) -> None:
        if not self.stops:
            path = self._log_path(name)
            # It looks after that file itself (core/logfile.py); until it does, its output goes there all the same.
            own = {"EFT_LOG_FILE": str(path), health.START_VARIABLE: self._start_name}
            environment = member_environment.of(name, self.environment) | own
            command = [sys.executable, "-m", module]
            self._add(ManagedProcess(name, command, environment, HOME, path, forks=self._forks))

    def _add(self, member: ManagedProcess) -> None:
        member.inherit = (self.instance.descriptor,)
        member.start()
        self.members.append(member)
        self._record()

    def _log_path(self, name: str) -> Path:
        folder = self.layout.root / "logs"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / f"{name}.log"

    def _record(self) -> None:
        pids = {member.name: member.pid for member in self.members}
        self.instance.record({"url": self.url, "pids": {"up": os.getpid(), **pids}})

    # -- staying up

    def _look(self) -> None:
        """Start again what has ended; raises GivesUp when that does not help."""
        now = time.monotonic()
        for member in self.members:
            if member.process is not None and member.process.poll() is not None:
                self._ended(member, now)
            if member.process is None and now >= member.next_start:
                member.start()
                self._record()
        if now >= self._log_look:
            self._log_look = now + 10.0
            for member in self.members:
                self._rotate(member)

    def _rotate(self, member: ManagedProcess) -> None:
        """The broker opens its log for each line it writes; API and worker do it themselves, unless they are down."""
        if member.name == "broker" or member.process is None:
            with suppress(FileNotFoundError):
                if member.log.stat().st_size >= self.settings.log_bytes:
                    logfile.rotate(member.log, self.settings.log_files)

    def _ended(self, member: ManagedProcess, now: float) -> None:
        assert member.process is not None
        code = member.process.returncode
        member.process = None
        member.failures = member.failures + 1 if now - member.began < self._soon else 1
        if code == EXIT_CONFIG or (member.failures >= MAX_FAILURES and code != EXIT_NOT_NOW):
            times = "" if code == EXIT_CONFIG else f" {MAX_FAILURES} times in a row, each soon after its start"
            raise GivesUp(
                f"the {member.name} ended{times} (exit status {code}); {member.log} ends with\n{member.tail()}"
            )
        wait = min(MAX_BACKOFF_SECONDS, 0.25 * 2 ** min(member.failures - 1, 10))
        member.next_start = now + wait
        print(f"the {member.name} ended (exit status {code}); starting it again in {wait:g} s", flush=True)

    def _wait_until_ready(self) -> bool:
        """False: asked to stop meanwhile."""
        database = Database(self.settings.sqlalchemy_url)
        began = time.monotonic()
        deadline = began + READY_SECONDS
        try:
            while not (self._api_answers() and self._worker_serves(database)):
                if self.stops:
                    return False
                if time.monotonic() > deadline:
                    raise GivesUp(f"not ready after {READY_SECONDS:g} s; see the logs in {self.layout.root / 'logs'}")
                self._look()
                time.sleep(LOOK_SECONDS)
        finally:
            database.dispose()
        self._soon = max(SOON_SECONDS, 2 * (time.monotonic() - began))
        return True

    def _api_answers(self) -> bool:
        any_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 -- compared, not bound
        host = any_address.get(self.settings.host, self.settings.host)
        connection = http.client.HTTPConnection(host, self.settings.port, timeout=2.0)
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            # Not whoever answers there: the key that is shown next must be one of this installation.
            return answer.status == 200 and answer.getheader(health.START_HEADER) == self._start_name
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _worker_serves(self, database: Database) -> bool:
        with database.read() as session:
            self._slots = session.execute(
                select(Node.slots).where(Node.name == self.settings.node, Node.started_at >= self._since)
            ).scalar_one_or_none()
        return self._slots is not None

    def _say_ready(self, key: str | None) -> None:
        slots = ", ".join(slot["id"] for slot in self._slots or [] if slot["kind"] in ("gpu", "cpu"))
        print(f"eft {__version__} is up at {self.url}   (docs: {self.url}/docs)")
        if (words := crosses_in_clear(self.settings)) is not None:
            print(f"  warning: {words}")
        print(f"  data {self.layout.root}   node {self.settings.node}: {slots}   logs {self.layout.root / 'logs'}")
        if key is not None and self.key_file is None:
            print(f"  your API key, shown this once: {key}")
        elif self.key_file is not None:
            print(f"  API key: in {self.key_file}")
        print("  try:")
        print(f"    export EFT_URL={self.url} EFT_API_KEY={key if key and self.key_file is None else '…'}")
        print("    eft submit examples/voice-intents/job.yaml --wait")
        print("  Ctrl+C stops it; running jobs continue at the next start.", flush=True)
        if self.key_file is None:
            (self.layout.root / "first.key").unlink(missing_ok=True)

    # -- down

    def _stop(self) -> None:
        """Worker, API, broker, one after the other; a second signal hurries. Nothing is left when this returns."""
        for name, grace in (("worker", self.settings.stop_grace_seconds + 45.0), ("api", 20.0), ("broker", 20.0)):
            for member in self.members:
                if member.name == name:
                    self._end(member, grace)
        if self._forks is not None:
            self._forks.stop()
        self.instance.forget()

    def _end(self, member: ManagedProcess, grace: float) -> None:
        member.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while not member.ended():
            if self.stops > 1 or time.monotonic() > deadline:
                member.signal(signal.SIGKILL)
            time.sleep(0.02)


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def main() -> int:
    private.umask()
    parser = argparse.ArgumentParser(prog="python -m box.up", description="The whole service on this machine.")
    parser.add_argument("--host", help="address to listen on (EFT_HOST; default 127.0.0.1)")
    parser.add_argument("--port", type=_port, help="port to listen on, 0 for any free one (EFT_PORT; default 8321)")
    parser.add_argument("--gpus", help="offer only these GPUs, e.g. 0,1 (EFT_GPUS; default: all)")
    parser.add_argument("--slots", type=int, help="concurrent jobs on a box without GPUs (EFT_CPU_SLOTS; default 1)")
    parser.add_argument("--key-file", type=Path, help="write the first API key to this file instead of showing it")
    given = parser.parse_args()
    for name, setting in (("host", "HOST"), ("port", "PORT"), ("gpus", "GPUS"), ("slots", "CPU_SLOTS")):
        if getattr(given, name) is not None:
            os.environ[f"EFT_{setting}"] = str(getattr(given, name))
    settings = read_settings()
    make_root(settings)
    try:
        instance = Instance.take(settings.root, patience=settings.stop_grace_seconds + 60.0)
    except AlreadyRunning as error:
        print(f"eft: {error}", file=sys.stderr)
        return 1
    if (words := ports.obstacle(settings.host, settings.port)) is not None:
        print(f"eft: {words}", file=sys.stderr)
        return 1
    if settings.port == 0:
        settings = settings.model_copy(update={"port": free_port(settings.host)})
    return Supervisor(settings, instance, given.key_file.absolute() if given.key_file else None).run()


if __name__ == "__main__":
    command.run("eft up", main)
