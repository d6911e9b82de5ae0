"""A real API process on a free port, over a data root and a database of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from api.auth import keys
from api.auth.policy import Role, Scope
from core.base import forks as base_forks
from core.db.engine import Database
from core.db.migrate import upgrade
from core.db.tables import Job
from core.jobs.base.transitions import Token
from core.jobs.lifecycle.claims import Slot, claim, running
from core.jobs.lifecycle.finish import Outcome, RetryPolicy, Succeeded, finish
from core.jobs.lifecycle.relay import EventBatch, relay
from core.jobs.lifecycle.submit import Actor, cancel
from core.storage.layout import Layout
from tests.support import forks, migrated
from tests.support.ports import held_port
from tests.support.selection import EVERYTHING
from tests.support.world import Caller, World, world

NO_LIMITS = {"min_free_bytes": 0, "rate_per_minute": 0, "rate_strangers_per_minute": 0, "rate_public_per_minute": 0}
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ROWS = [
    {"messages": [{"role": "user", "content": f"lamp {number} on"}, {"role": "assistant", "content": "lamp.on"}]}
    for number in range(3)
]
EVAL_ROWS = [{"prompt": f"lamp {number} off", "completion": "lamp.off"} for number in range(2)]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@dataclass
class Api:
    """A running API, and what a test needs to look behind it."""

    url: str
    root: Path
    database_url: str
    process: subprocess.Popen[bytes] | forks.Program
    log_file: Path
    database: Database
    key: str = ""
    _clients: list[httpx.Client] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        return Layout(self.root)

    @property
    def http(self) -> httpx.Client:
        """A client of the first key's owner."""
        return self._clients[0]

    def client(self, project: str, user: str = "ada") -> httpx.Client:
        """A client with a new key."""
        key = keys.create(self.database, project=project, user=user, name="test")
        assert key is not None
        return self.with_key(key)

    def with_key(self, key: str | None) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        client = httpx.Client(base_url=self.url, headers=headers, timeout=30)
        self._clients.append(client)
        return client

    def upload(self, data: bytes, filename: str = "rows.jsonl", client: httpx.Client | None = None) -> dict[str, Any]:
        reply = (client or self.http).post("/files", files={"file": (filename, data)})
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def submit(self, client: httpx.Client | None = None, **spec: Any) -> dict[str, Any]:
        client = client or self.http
        if "data" not in spec:
            spec["data"] = self.upload(jsonl(ROWS), client=client)["id"]
        reply = client.post("/jobs", json={"model": MODEL, **spec})
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    # --- what a worker would do, through the functions it calls ---

    def start_job(self, **spec: Any) -> tuple[str, Token]:
        """A job that has been prepared and runs as its attempt 2. Jobs that other tests left waiting are cancelled."""
        self.clear_line()
        job_id = self.submit(**spec)["id"]
        with self.database.write() as session:
            first = claim(session, "wrk-test", "box", Slot(f"prepare-{job_id}", "prepare"), 600)
            assert first is not None and first.token.job_id == job_id
            finish(session, first.token, "prepare", Succeeded({"path": "m"}), 0, RetryPolicy())
        return job_id, self.go_on(job_id)

    def clear_line(self) -> None:
        """Whatever other tests have left waiting."""
        with self.database.write() as session:
            waiting = session.execute(select(Job).where(Job.status == "queued", Job.kind == "train")).scalars().all()
            for job in waiting:
                cancel(session, Actor(job.owner_id, job.project_id), job.id)

    def go_on(self, job_id: str) -> Token:
        """Claim the waiting job for training."""
        with self.database.write() as session:
            found = claim(session, "wrk-test", "box", Slot(f"cpu-{job_id}", "cpu"), 600)
            assert found is not None and found.token.job_id == job_id
            running(session, found.token)
            return found.token

    def tell(self, token: Token, *lines: dict[str, Any]) -> None:
        """Lines of a trainer's events.jsonl."""
        told = [{"seq": number, "time": time.time(), **line} for number, line in enumerate(lines, 1)]
        with self.database.write() as session:
            assert relay(session, token, EventBatch(0, told))

    def end(self, token: Token, outcome: Outcome) -> None:
        with self.database.write() as session:
            finish(session, token, "train", outcome, 0, RetryPolicy())

    def log(self) -> str:
        return self.log_file.read_text()

    def stop(self, sig: int = signal.SIGTERM) -> float:
        """Seconds from the signal to the end."""
        began = time.monotonic()
        self.process.send_signal(sig)
        self.process.wait(120)
        return time.monotonic() - began


StartApi = Callable[..., AbstractContextManager[Api]]


@contextlib.contextmanager
def running_api(
    folder: Path,
    database_url: str | None = None,
    *,
    migrate: bool = True,
    descriptors: int = 0,
    **settings: Any,
) -> Iterator[Api]:
    """`descriptors`: files and connections that the process may have open at most."""
    root = folder / "data"
    root.mkdir(mode=0o700, exist_ok=True)
    if not database_url:
        database_url = f"sqlite:///{root / 'eft.db'}"
        if migrate:
            migrated.lay(root / "eft.db")
    database = Database(database_url)
    if migrate:
        upgrade(database)
    holding = contextlib.ExitStack()
    port = holding.enter_context(held_port())
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EFT_")}
    environment |= {"EFT_DATA": str(root), "EFT_DATABASE_URL": database_url, "EFT_PORT": str(port)}
    environment |= {f"EFT_{name.upper()}": str(value) for name, value in {**NO_LIMITS, **settings}.items()}
    log_file = folder / "api.log"
    with log_file.open("wb") as log:
        process = forks.start("api", environment=environment, log=log.fileno(), descriptors=descriptors)
    api = Api(f"http://127.0.0.1:{port}", root, database_url, process, log_file, database)
    try:
        _wait(api)
        if migrate:
            api.key = keys.create(database, project="lab", user="ada", name="test") or ""
            api.with_key(api.key)
        yield api
    finally:
        for client in api._clients:
            client.close()
        if api.process.poll() is None:  # the last one: a test may have killed the first and started another
            api.process.terminate()
            try:
                api.process.wait(20)
            except subprocess.TimeoutExpired:
                api.process.kill()
                api.process.wait()
        holding.close()
        database.dispose()


def _wait(api: Api) -> None:
    deadline = time.monotonic() + 150
    while True:
        try:
            if httpx.get(f"{api.url}/healthz").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if api.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"the API did not start:\n{api.log()}")
        time.sleep(0.05)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "both_databases: run on PostgreSQL too, not on SQLite alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test runs on SQLite; one that is marked `both_databases`, on PostgreSQL too.

    The mark is for what the databases do differently: races, locks, ordering, pages, JSON, numbers and texts that one
    of them refuses. What claims, leases and the queue ask of them is tested on both in tests/db.
    """
    if "database_kind" in metafunc.fixturenames:
        both = EVERYTHING or metafunc.definition.get_closest_marker("both_databases") is not None
        kinds = ["sqlite", "postgresql"] if both else ["sqlite"]
        metafunc.parametrize("database_kind", kinds, indirect=True, scope="module")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers and spares that this process starts are forks of what has been imported."""
    monkeypatch.setattr(base_forks, "launch", forks.launch)


@pytest.fixture(scope="module")
def database_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def database_url(request: pytest.FixtureRequest, database_kind: str) -> str:
    """A new database of this kind at the newest schema; "" is the SQLite file of the data root."""
    return "" if database_kind == "sqlite" else request.getfixturevalue("migrated_postgresql")()


@pytest.fixture(scope="session")
def migrated_postgresql(postgres_databases: Callable[..., str]) -> Callable[[], str]:
    """Call it for the URL of a new database at the newest schema. Migrating one takes longer than copying it."""
    first = postgres_databases()
    database = Database(first)
    upgrade(database)
    database.dispose()
    return lambda: postgres_databases(first)


@pytest.fixture(scope="module")
def api(request: pytest.FixtureRequest, database_kind: str) -> Api:
    """The API of this kind of database that all tests of a process share."""
    found: Api = request.getfixturevalue(f"{database_kind}_api")
    return found


@pytest.fixture(scope="session")
def sqlite_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Ask for `api`."""
    with running_api(tmp_path_factory.mktemp("api-sqlite")) as running:
        yield running


@pytest.fixture(scope="session")
def postgresql_api(tmp_path_factory: pytest.TempPathFactory, postgres_databases: Callable[[], str]) -> Iterator[Api]:
    """Ask for `api`."""
    with running_api(tmp_path_factory.mktemp("api-postgresql"), postgres_databases()) as running:
        yield running


@pytest.fixture(scope="module")
def here(database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two projects with everything in them, behind the application in this process."""
    with world(tmp_path_factory.mktemp("world") / "data", database_url) as made:
        yield made


@pytest.fixture(scope="module")
def boss(here: World) -> Caller:
    """An admin of the box and of the project `lab`."""
    return here.caller("boss", Role.ADMIN, Scope.BOX, box_admin=True)


@pytest.fixture
def start_api(tmp_path: Path) -> StartApi:
    """An API of the test's own: `with start_api(max_upload_bytes=1000) as api`."""
    return lambda **settings: running_api(tmp_path, **settings)
