"""Every revision, up and down, on both databases; and the schema they make is the one the code has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from core import HOME
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base


def revisions() -> list[str]:
    script = ScriptDirectory(str(HOME / "migrations"))
    return [revision.revision for revision in reversed(list(script.walk_revisions()))]


def tables(database: Database) -> set[str]:
    with database.read() as session:
        return set(inspect(session.connection()).get_table_names()) - {"alembic_version"}


def test_every_step_up_and_down_and_up_again(empty_url: str) -> None:
    database = Database(empty_url)
    assert migrate.current(database) is None
    for revision in revisions():
        migrate.upgrade(database, revision)
        assert migrate.current(database) == revision
    assert migrate.current(database) == migrate.head()
    assert tables(database) == set(Base.metadata.tables)
    for revision in [*reversed(revisions()[:-1]), "base"]:
        migrate.downgrade(database, revision)
        assert migrate.current(database) == (None if revision == "base" else revision)
    assert tables(database) == set()
    migrate.upgrade(database)
    assert tables(database) == set(Base.metadata.tables)
    database.dispose()


def test_the_migrated_schema_is_the_codes(database: Database) -> None:
    with database.read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_several_processes_may_migrate_at_once(empty_url: str, tmp_path: Path) -> None:
    environment = os.environ | {"EFT_DATABASE_URL": empty_url, "EFT_DATA": str(tmp_path)}
    command = [sys.executable, "-m", "core.db.migrate"]
    migrations = [subprocess.Popen(command, cwd=HOME, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    for migration in migrations:
        migration.communicate(timeout=200)
    assert [migration.returncode for migration in migrations] == [0] * 3
    database = Database(empty_url)
    assert migrate.current(database) == migrate.head()
    database.dispose()
