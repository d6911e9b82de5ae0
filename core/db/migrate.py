"""Bring a database to this version's schema, and say which versions may use one: `python -m core.db.migrate`.

Migrations only expand (docs/operations.md): what an older version reads and writes stays as it is, so that its workers
go on while, and after, a newer one migrates. Where that has to end, a migration says so: `works_from = '…'` in its
module is the oldest schema whose code may use a database from then on. It is kept in the database, since the older code
has never heard of that migration.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext, RevisionStep
from alembic.script import Script, ScriptDirectory
from sqlalchemy import delete, insert, inspect, select
from sqlalchemy.orm import Session

from core import HOME, private
from core import command as ending
from core.db.engine import Database
from core.db.tables import SchemaFloor
from core.errors import EftError
from core.settings import make_root, settings

SCRIPTS = HOME / "migrations"


class NewerSchema(EftError):
    """The database belongs to a newer version."""

    code = "newer_schema"


@dataclass(frozen=True, slots=True)
class SchemaState:
    """How a database stands to this version's code."""

    current: str | None
    """Its revision; None: it is empty."""
    head: str
    """The revision this code was written for."""
    fit: bool
    """This code may use it."""
    newer: bool
    words: str


@cache
def _scripts(folder: Path) -> ScriptDirectory:
    """The migrations of a folder, read once a process: alembic executes every module of it."""
    return ScriptDirectory(str(folder))


def _config(database: Database, scripts: Path = SCRIPTS) -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts).replace("%", "%%"))
    config.attributes["database"] = database
    return config


def upgrade(database: Database, revision: str = "head", *, scripts: Path = SCRIPTS) -> None:
    """Run the missing migrations, one transaction in all. Several processes may call it at once; one of them works.

    A database of a newer version stays as it is. Raises NewerSchema when this one may not use it.
    """
    found = standing(database, scripts)
    if found.fit:
        return
    if found.newer:
        raise NewerSchema(f"the database {found.words}")
    known = _scripts(scripts)

    def missing(at: Any, context: MigrationContext) -> list[RevisionStep]:
        return known._upgrade_revs(revision, at)

    # As alembic.command.upgrade does it, which would read all migrations anew.
    with EnvironmentContext(_config(database, scripts), known, fn=missing, destination_rev=revision):
        known.run_env()


def downgrade(database: Database, revision: str) -> None:
    command.downgrade(_config(database), revision)


def head(scripts: Path = SCRIPTS) -> str:
    """The revision this code was written for."""
    revision = _scripts(scripts).get_current_head()
    assert revision is not None
    return revision


def current(database: Database) -> str | None:
    """The revision the database is at; None for an empty one."""
    with database.read() as session:
        return MigrationContext.configure(session.connection()).get_current_revision()


def history(scripts: Path = SCRIPTS, upto: str = "head") -> Iterator[Script]:
    """Migrations from the first one on, `upto` included."""
    yield from reversed(list(_scripts(scripts).iterate_revisions(upto, "base")))


def standing(database: Database, scripts: Path = SCRIPTS) -> SchemaState:
    """May this code use the database as it is? Reads only."""
    known = {script.revision for script in history(scripts)}
    with database.read() as session:
        found = MigrationContext.configure(session.connection()).get_current_revision()
        works_from = None if found is None or found in known else _floor(session)
    wanted = head(scripts)
    if found == wanted:
        return SchemaState(found, wanted, True, False, wanted)
    if found is None:
        return SchemaState(None, wanted, False, False, f"is missing, this version needs {wanted}: run `eft migrate`")
    if found in known:
        return SchemaState(
            found, wanted, False, False, f"is at {found}, this version needs {wanted}: run `eft migrate`"
        )
    if works_from in known:
        return SchemaState(
            found, wanted, True, True, f"{found}, of a newer version; this one ({wanted}) can still use it"
        )
    words = (
        f"is at {found}, of a newer version, and only those from {works_from or 'there'} on may use it; this one knows "
        f"{wanted}: bring this box to the same version as the others"
    )
    return SchemaState(found, wanted, False, True, words)


def _floor(session: Session) -> str | None:
    if not inspect(session.connection()).has_table(SchemaFloor.__tablename__):
        return None
    return session.execute(select(SchemaFloor.works_from)).scalar_one_or_none()


def record_floor(session: Session, scripts: Path) -> None:
    """Keep in the database who may use it from now on; migrations/env.py calls it in the transaction of migrating."""
    if not inspect(session.connection()).has_table(SchemaFloor.__tablename__):
        return
    found = MigrationContext.configure(session.connection()).get_current_revision()
    stated = [getattr(script.module, "works_from", None) for script in history(scripts, found or "head")]
    session.execute(delete(SchemaFloor))
    session.execute(insert(SchemaFloor).values(works_from=[one for one in stated if one][-1]))


def bring_forward() -> int:
    """The database of the settings to this version's schema, in words; the exit status."""
    here = settings()
    make_root(here)
    try:
        private.close(here.root)
    except private.OpenDataRoot as error:
        print(f"eft migrate: {error}", file=sys.stderr)
        return 1
    database = Database(here.sqlalchemy_url)
    before = current(database)
    try:
        upgrade(database)
    except NewerSchema as error:
        print(f"eft migrate: {error}", file=sys.stderr)
        return 1
    finally:
        database.dispose()
    print(f"schema: {before or 'empty'} -> {current(database)}")
    return 0


if __name__ == "__main__":
    private.umask()
    argparse.ArgumentParser(
        prog="eft migrate",
        description="Bring the database to this version's schema, while jobs run. The same as `eft db upgrade`.",
        epilog="Settings: EFT_DATA, EFT_DATABASE_URL. Exit status 0: done; 1: it belongs to a newer version.",
    ).parse_args()
    ending.run("eft migrate", bring_forward)
