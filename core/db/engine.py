"""One `Database` for SQLite and PostgreSQL: a write transaction, a read transaction, and the database's own clock.

SQLite: WAL, synchronous FULL, and BEGIN IMMEDIATE for every write. A deferred transaction that reads and then
writes fails with "database is locked" as soon as another writer came between; an immediate one waits its turn.
Reads have an engine of their own, so that they never queue behind a writer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, Float, create_engine, event, make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Session
from sqlalchemy.sql.functions import FunctionElement


class db_now(FunctionElement[float]):  # noqa: N801 -- reads as a SQL function
    """Seconds since 1970 by the database's clock: leases compare one clock with itself, whatever the nodes' say."""

    type = Float()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite_now(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql_now(element: Any, compiler: Any, **kwargs: Any) -> str:
    return "extract(epoch from clock_timestamp())::double precision"


class Database:
    """Transactions on one database. Thread-safe; a Session belongs to the thread that opened it."""

    def __init__(self, url: str) -> None:
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._writer = self._engine("BEGIN IMMEDIATE")
        self._reader = self._engine("BEGIN") if self.is_sqlite else self._writer

    def _engine(self, begin: str) -> Engine:
        if not self.is_sqlite:
            return create_engine(self.url, pool_pre_ping=True, pool_size=10, max_overflow=20, pool_recycle=1800)
        engine = create_engine(self.url, pool_size=10, max_overflow=20, connect_args={"timeout": 30})

        @event.listens_for(engine, "connect")
        def _on_connect(connection: sqlite3.Connection, _: Any) -> None:
            connection.isolation_level = None  # SQLAlchemy's events below begin transactions, not the driver
            for pragma in ("busy_timeout=30000", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                connection.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _on_begin(connection: Any) -> None:
            connection.exec_driver_sql(begin)

        return engine

    @contextmanager
    def write(self) -> Iterator[Session]:
        """One transaction: committed when the block ends, rolled back when it raises. No network call inside."""
        with Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view that never waits for a writer."""
        with Session(self._reader, expire_on_commit=False) as session, session.begin():
            yield session

    def now(self) -> float:
        with self.read() as session:
            return float(session.execute(db_now().select()).scalar_one())

    def dispose(self) -> None:
        self._writer.dispose()
        self._reader.dispose()
