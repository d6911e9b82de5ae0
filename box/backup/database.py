"""What the database said at one moment, while everybody goes on writing; and putting it into an empty one.

SQLite: the online backup API copies the file as of one read transaction, which no writer waits for in WAL mode
(https://www.sqlite.org/backup.html). PostgreSQL: COPY of each of our tables inside one REPEATABLE READ transaction.
That is what pg_dump does, less the schema, which our migrations make; so nobody needs PostgreSQL's client programs, nor
the right version of them.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
from psycopg import sql
from sqlalchemy import delete, insert, inspect, select
from sqlalchemy.orm import Session

from box.backup.store import BLOCK, BackupError
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base, Installation

SQLITE = "eft.db"
COLUMNS = "columns.json"
ROWS = 1000
"""Copied at once from SQLite to PostgreSQL."""


# -- out


@dataclass(frozen=True, slots=True)
class Dump:
    """What a database says at one moment, and what it names on the data root."""

    revision: str
    """Revision of the schema."""
    taken_at: float
    """That moment, by the database's clock."""
    files: dict[str, str]
    """Uploads: id → SHA-256."""
    attempts: dict[str, int]
    """Job → its newest attempt."""
    artifacts: dict[tuple[str, int, str], str]
    """(job, attempt, path below its artifacts) → SHA-256."""


def dump(database: Database, folder: Path) -> Dump:
    """Write the database into `folder`, which is created. No other process waits for it."""
    folder.mkdir(mode=0o700)
    if database.is_sqlite:
        return _dump_sqlite(database, folder / SQLITE)
    return _dump_postgresql(database, folder)


def _dump_sqlite(database: Database, path: Path) -> Dump:
    assert database.url.database is not None
    # Before the copy: what is younger than that moment may be in it, what is older is.
    taken_at = database.now()
    with closing(sqlite3.connect(database.url.database)) as source, closing(sqlite3.connect(path)) as target:
        source.execute("PRAGMA busy_timeout=30000")
        source.backup(target)  # in one step: in several, every commit of another process would restart it
        target.execute("PRAGMA journal_mode=DELETE")  # one file, which is all of it
        (found,) = target.execute("PRAGMA quick_check").fetchone()
        if found != "ok":
            raise BackupError(f"the database is damaged ({found}): see docs/operations.md before anything else")
        row = target.execute("SELECT version_num FROM alembic_version").fetchone()
        said = Dump(_known(row), taken_at, *_named(target))
        target.commit()
    path.chmod(0o600)
    return said


def _dump_postgresql(database: Database, folder: Path) -> Dump:
    with _connection(database) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        taken_at = connection.execute("SELECT extract(epoch from clock_timestamp())::double precision").fetchone()
        revision = _known(connection.execute("SELECT version_num FROM alembic_version").fetchone())
        columns = {table: _columns(connection, table) for table in _tables(connection)}
        for table, names in columns.items():
            query = sql.SQL("COPY {} ({}) TO STDOUT").format(sql.Identifier(table), _list(names))
            path = folder / f"{table}.copy.gz"
            with (
                gzip.open(path, "wb", compresslevel=1) as out,
                connection.cursor() as cursor,
                cursor.copy(query) as rows,
            ):
                for block in rows:
                    out.write(block)
        (folder / COLUMNS).write_text(json.dumps(columns, indent=1), encoding="utf-8")
        assert taken_at is not None
        return Dump(revision, float(taken_at[0]), *_named(connection))


class _Asks(Protocol):
    """What both drivers' connections can do."""

    def execute(self, query: Any, /) -> Any: ...


def _named(connection: _Asks) -> tuple[dict[str, str], dict[str, int], dict[tuple[str, int, str], str]]:
    artifacts = connection.execute("SELECT job_id, attempt, path, sha256 FROM artifacts").fetchall()
    return (
        dict(connection.execute("SELECT id, sha256 FROM files").fetchall()),
        dict(connection.execute("SELECT id, attempt FROM jobs").fetchall()),
        {(job, attempt, path): sha256 for job, attempt, path, sha256 in artifacts},
    )


def _known(row: Any) -> str:
    if row is None:
        raise BackupError("the database is empty: there is nothing to keep yet")
    return str(row[0])


# -- in


def require_empty(database: Database) -> None:
    """Raises BackupError where somebody's rows are."""
    with database.read() as session:
        there = set(inspect(session.connection()).get_table_names())
        taken = [
            table.name
            for table in Base.metadata.sorted_tables
            if table.name in there
            and table.name not in (*_OURS, INSTALLATION)
            and session.execute(select(table).limit(1)).first()
        ]
    if taken:
        raise BackupError(
            f"the database {database.url.render_as_string(hide_password=True)} is not empty ({', '.join(taken[:3])}): "
            "a backup goes into a new one (EFT_DATABASE_URL)"
        )


_OURS = ("schema_floor",)
"""What migrations themselves write, and what stays as they write it."""
INSTALLATION = Installation.__tablename__
"""A migration makes its one row, too; a restored installation keeps its own."""


def load_sqlite(path: Path, target: Database, session: Session) -> int:
    """Rows of a copy of SQLite's, at this version's schema, into PostgreSQL, at the same. Returns how many."""
    source, count = Database(f"sqlite:///{path}"), 0
    session.execute(delete(Installation))
    try:
        with source.read() as reading:
            for table in Base.metadata.sorted_tables:
                if table.name in _OURS:
                    continue
                rows = reading.execute(select(table).order_by(*table.primary_key.columns))
                for block in rows.mappings().partitions(ROWS):
                    session.execute(insert(table), [dict(row) for row in block])
                    count += len(block)
    finally:
        source.dispose()
    return count


def load_postgresql(folder: Path, session: Session) -> int:
    """Every table's rows, in the caller's transaction; the schema is at the dump's revision or a later one. Returns how
    many."""
    columns: dict[str, list[str]] = json.loads((folder / COLUMNS).read_text(encoding="utf-8"))
    connection = session.connection().connection.driver_connection
    assert isinstance(connection, psycopg.Connection)
    order = [table.name for table in Base.metadata.sorted_tables if table.name in columns]
    unknown = sorted(set(columns) - set(order) - {"alembic_version"})
    if unknown:
        raise BackupError(f"the backup has tables that this version does not know: {', '.join(unknown)}")
    count = 0
    for table in order:
        if table in _OURS:
            continue
        if table == INSTALLATION:
            session.execute(delete(Installation))
        query = sql.SQL("COPY {} ({}) FROM STDIN").format(sql.Identifier(table), _list(columns[table]))
        with gzip.open(folder / f"{table}.copy.gz", "rb") as rows, connection.cursor() as cursor:
            with cursor.copy(query) as copy:
                while block := rows.read(BLOCK):
                    copy.write(block)
            count += cursor.rowcount
    return count


def prepare(database: Database, revision: str) -> None:
    """Bring an empty database to the schema that a dump is of."""
    found = migrate.current(database)
    if found is not None and found != revision:
        migrate.downgrade(database, revision)
    migrate.upgrade(database, revision)


# -- PostgreSQL


@contextmanager
def _connection(database: Database) -> Iterator[psycopg.Connection[Any]]:
    plain = database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        yield connection


def _tables(connection: psycopg.Connection[Any]) -> list[str]:
    found = connection.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() ORDER BY tablename"
    ).fetchall()
    ours = set(Base.metadata.tables) | {"alembic_version"}
    return [name for (name,) in found if name in ours]


def _columns(connection: psycopg.Connection[Any], table: str) -> list[str]:
    found = connection.execute(
        "SELECT column_name FROM information_schema.columns WHERE table_schema = current_schema() AND table_name = %s "
        "ORDER BY ordinal_position",
        (table,),
    ).fetchall()
    return [name for (name,) in found]


def _list(names: list[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
