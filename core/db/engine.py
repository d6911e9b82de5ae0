"""One `Database` for SQLite and PostgreSQL: a write transaction, a read transaction, and the database's own clock.

SQLite: WAL, synchronous FULL, and BEGIN IMMEDIATE for every write. A deferred transaction that reads and then
writes fails with "database is locked" as soon as another writer came between; an immediate one waits its turn.
Reads have an engine of their own, so that they never queue behind a writer.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, Float, create_engine, event, make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement

BUSY_SECONDS = 30.0
"""How long a writer waits for its turn on SQLite."""
THREADS = 40
"""Connections that SQLite keeps open: one for each thread that the API answers in. Opening one reads the schema."""


class db_now(FunctionElement[float]):  # noqa: N801 -- reads as a SQL function
    """Seconds since 1970 by the database's clock: leases compare one clock with itself, whatever the nodes' say."""

    type = Float()
    inherit_cache = True


def read_now(session: Session) -> float:
    """The database's time, Unix seconds."""
    return float(session.execute(db_now().select()).scalar_one())


_CLOCKED = "eft_clocked"
"""Mark of a dialect whose connections have `eft_now()`."""


@compiles(db_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "eft_now()" if hasattr(compiler.dialect, _CLOCKED) else "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


class WriteQueue:
    """The writers of one process in the order in which they came.

    SQLite lets one in at a time and the others ask again after sleeps that grow to 100 ms, whoever waits longest: under
    load somebody is always passed over. Here the one who has waited longest is next, the moment the lock is free.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def acquire(self, seconds: float) -> bool:
        """False: it was somebody else's turn for all of that time."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        if turn.acquire(timeout=seconds):
            return True
        with self._lock:
            if turn not in self._waiting:  # it became ours at the last moment
                return True
            self._waiting.remove(turn)
            return False

    def release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()  # handed over, so that no newcomer gets in between
            else:
                self._taken = False


class Database:
    """Transactions on one database. Thread-safe; a Session belongs to the thread that opened it.

    `clock` (SQLite alone): seconds since 1970 in place of the database's own clock, for simulations (bench/lab), where
    a week takes a minute. All that compares times does so by `db_now`, so all of it follows.
    """

    def __init__(self, url: str, clock: Callable[[], float] | None = None) -> None:
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if clock is not None and not self.is_sqlite:
            raise ValueError("only SQLite accepts a clock other than the database's own")
        self._clock = clock
        self._writer = self._engine("BEGIN IMMEDIATE")
        self._reader = self._engine("BEGIN") if self.is_sqlite else self._writer
        self._queue = WriteQueue() if self.is_sqlite else None

    def _engine(self, begin: str) -> Engine:
        if not self.is_sqlite:
            return create_engine(self.url, pool_pre_ping=True, pool_size=10, max_overflow=20, pool_recycle=1800)
        engine = create_engine(self.url, pool_size=THREADS, max_overflow=20, connect_args={"timeout": BUSY_SECONDS})

        if self._clock is not None:
            setattr(engine.dialect, _CLOCKED, True)

        @event.listens_for(engine, "connect")
        def _on_connect(connection: sqlite3.Connection, _: Any) -> None:
            connection.isolation_level = None  # SQLAlchemy's events below begin transactions, not the driver
            connection.execute(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
            _write_ahead(connection)
            for pragma in ("synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")
            if self._clock is not None:
                connection.create_function("eft_now", 0, self._clock)

        @event.listens_for(engine, "begin")
        def _on_begin(connection: Any) -> None:
            connection.exec_driver_sql(begin)

        return engine

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed when the block ends, rolled back when it raises. No network call inside."""
        with self._turn(), Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._queue is None:
            yield
            return
        if not self._queue.acquire(BUSY_SECONDS):
            locked = sqlite3.OperationalError("database is locked")  # as SQLite itself would have said
            raise OperationalError("BEGIN IMMEDIATE", None, locked)
        try:
            yield
        finally:
            self._queue.release()

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view that never waits for a writer."""
        with Session(self._reader, expire_on_commit=False) as session, session.begin():
            yield session

    def now(self) -> float:
        with self.read() as session:
            return read_now(session)

    def dispose(self) -> None:
        self._writer.dispose()
        self._reader.dispose()


def _write_ahead(connection: sqlite3.Connection) -> None:
    """WAL. A new database becomes one by a write that begins as a read, which SQLite refuses at once where another
    process does the same, whatever the timeout."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
