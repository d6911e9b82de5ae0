"""The installation under test: PostgreSQL or SQLite, broker, API and two workers, each a process that can be ended.

What systemd would do is done here: what ended is started again, after a while, and nothing waits for anything else.
Everything ends with this process; start members from its main thread alone, since the kernel ties that to a thread.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from box import broker
from tests.support import forks, postgres, selftest

ROOT = Path(__file__).resolve().parents[3]
RESTART_SECONDS = 0.3
"""After a member that ended by itself."""
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # a frozen one hears nothing else


@dataclass(slots=True)
class Member:
    """A process that is kept running."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    cwd: Path = ROOT
    user: int | None = None

    process: subprocess.Popen[bytes] | forks.Program | None = None
    start_at: float = 0.0
    """By the monotonic clock, when it is down."""
    own_ends: list[int] = field(default_factory=list)
    """Exit codes of ends that were not ours."""
    frozen_until: float | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            if tuple(self.command[:2]) == (sys.executable, "-m"):
                module, *arguments = self.command[2:]
                self.process = forks.start(
                    module, *arguments, environment=self.environment, log=log.fileno(), cwd=self.cwd, with_parent=True
                )
                return
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.cwd,
                env=dict(self.environment),
                start_new_session=True,
                preexec_fn=_end_with_parent,
                **({} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}),
            )

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self, again_after: float) -> bool:
        """kill -9; False when it was down already."""
        self.frozen_until = None
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.kill()
        self.process.wait()
        self.process = None
        self.start_at = time.monotonic() + again_after
        return True

    def terminate(self) -> bool:
        """SIGTERM; it is started again like one that ended by itself."""
        if not self.alive or self.frozen_until is not None:
            return False
        assert self.process is not None
        self.process.terminate()
        return True

    def freeze(self, seconds: float) -> bool:
        if not self.alive or self.frozen_until is not None:
            return False
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.frozen_until = time.monotonic() + seconds
        return True

    def thaw(self) -> None:
        self.frozen_until = None
        if self.alive:
            assert self.process is not None
            self.process.send_signal(signal.SIGCONT)

    def look(self, now: float) -> None:
        """Start it again when it is down and its time has come; wake it when its freeze is over."""
        if self.frozen_until is not None and now >= self.frozen_until:
            self.thaw()
        if self.process is not None and (code := self.process.poll()) is not None:
            self.own_ends.append(code)
            self.process = None
            self.start_at = now + RESTART_SECONDS
        if self.process is None and now >= self.start_at:
            self.start()

    def stop(self, grace: float) -> int | None:
        """SIGTERM, and its exit code; None when it had to be killed, or was down."""
        if self.process is None:
            return None
        self.thaw()
        self.process.terminate()
        try:
            return self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


class Postgres:
    """A server of its own, as durable as an ordinary one (`-F` would make a power cut a loss, not a kill)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        data = folder / "data"
        binaries = postgres.binaries(folder)
        user = postgres.NOBODY if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
        if user is not None:
            os.chown(folder, user, user)
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": str(folder)}
        subprocess.run(
            [binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=folder,
            env=environment,
            **({} if user is None else {"user": user, "group": user, "extra_groups": []}),
        )
        options = ["-D", str(data), "-k", str(folder), "-h", "", "-c", "max_connections=200"]
        self.member = Member(
            "database", [str(binaries / "postgres"), *options], environment, folder / "log", folder, user
        )
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"

    def answers(self) -> bool:
        try:
            psycopg.connect(f"host={self.folder} user=postgres dbname=postgres", connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


class Installation:
    """Two nodes on one data root. `lease`, `fence`, `renew` and `grace` (for a checkpoint) in seconds."""

    def __init__(
        self,
        folder: Path,
        database: str,
        models: Path,
        *,
        slots: int,
        lease: float,
        fence: float,
        renew: float,
        grace: float,
    ) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.data.mkdir(mode=0o700)
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.postgres = Postgres(folder / "pg") if database == "postgres" else None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.socket = self.data / "broker" / "valkey.sock"
        self.lease = lease
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")} | {
            "EFT_DATA": str(self.data),
            "EFT_PORT": str(self.port),
            "EFT_CPU_SLOTS": str(slots),
            "EFT_LEASE_SECONDS": str(lease),
            "EFT_FENCE_SECONDS": str(fence),
            "EFT_RENEW_SECONDS": str(renew),
            "EFT_RELAY_SECONDS": "0.2",
            "EFT_SWEEP_SECONDS": "1",
            "EFT_RETRY_BACKOFF_SECONDS": "0.05",
            "EFT_MAX_MACHINE_FAILURES": "1000",  # killed trainers are faults of the machine, and here they are many
            "EFT_MAX_LOST_WORKERS": "1000",
            "EFT_STOP_GRACE_SECONDS": str(grace),
            "EFT_GPU_CLEAR_SECONDS": "1",
            "EFT_PREEMPT_MIN_SECONDS": "1",
            "EFT_MIN_FREE_BYTES": "1000000",
            "EFT_RATE_PER_MINUTE": "0",
            "EFT_RATE_STRANGERS_PER_MINUTE": "0",
            "EFT_MODEL_ROOTS": str(models),
            "OMP_NUM_THREADS": "1",
        }
        if self.postgres is not None:
            self.environment["EFT_DATABASE_URL"] = self.postgres.url
        for name in ("a", "b"):
            selftest.lay(self.data, f"node-{name}", inherited=self.environment)
        self.key = ""
        broker.prepare(self.socket.parent, self.socket)
        self.broker = self._member("broker", broker.command(self.socket.parent, self.socket))
        self.api = self._member("api", [sys.executable, "-m", "api"])
        self.workers = [
            # One keeps a spare trainer and the other does not, so that both kinds of start are met.
            self._member(f"worker-{name}", [sys.executable, "-m", "worker"], EFT_NODE=f"node-{name}", EFT_SPARE=spare)
            for name, spare in (("a", "1"), ("b", "0"))
        ]
        self.members = [self.broker, self.api, *self.workers]
        if self.postgres is not None:
            self.members.insert(0, self.postgres.member)

    def _member(self, name: str, command: Sequence[str], **more: str) -> Member:
        return Member(name, command, {**self.environment, **more}, self.logs / f"{name}.log")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        """Database, schema, key, then all the rest."""
        if self.postgres is not None:
            self.postgres.member.start()
            wait_until(self.postgres.answers, 30, "PostgreSQL")
        forks.run("core.db.migrate", environment=self.environment)
        words = ["create", "--project", "chaos", "--user", "monkey"]
        self.key = forks.run("api.auth.keys", *words, environment=self.environment).strip()
        self.tick()
        wait_until(lambda: broker.answers(self.socket), 20, "the broker")

    def tick(self) -> None:
        """Look after the members; call it often."""
        now = time.monotonic()
        for member in self.members:
            member.look(now)

    def flushall(self) -> bool:
        """The broker forgets everything it had been told."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(2)
                connection.connect(str(self.socket))
                connection.sendall(b"FLUSHALL\r\n")
                return connection.recv(64).startswith(b"+OK")
        except OSError:
            return False

    def down(self) -> list[str]:
        """Workers first, as `eft up` stops them; what did not end well."""
        faults = []
        for member in (*self.workers, self.api, self.broker):
            code = member.stop(60)
            if code not in (0, -signal.SIGTERM):  # uvicorn ends in order, and then by the signal itself
                faults.append(f"{member.name} ended with {code} on SIGTERM")
        return faults

    def end_database(self) -> None:
        if self.postgres is not None:
            self.postgres.member.stop(20)

    def processes(self) -> dict[int, str]:
        """Living processes below this data root, by their environment or command line, less this one."""
        found = {}
        marker = os.fsencode(self.data)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                ours = marker in command or b"EFT_DATA=" + marker in (entry / "environ").read_bytes().split(b"\0")
                ours = ours or b"HOME=" + marker + b"/home" in (entry / "environ").read_bytes().split(b"\0")
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue  # it has just ended
        return found

    def end_all(self) -> None:
        """For the end of this process, however it came."""
        for member in self.members:
            member.kill(0)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def wait_until(condition: object, seconds: float, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)


def new_seed() -> int:
    return secrets.randbelow(1_000_000)
