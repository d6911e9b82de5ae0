"""Every revision, up and down, on both databases, and none but expands; and the schema they make is the one the code
has."""

from __future__ import annotations

import os
from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from core import HOME, private
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base
from core.settings import settings
from tests.support import schemas
from tests.support.at_once import at_once

BEFORE_THE_RULE = {"0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008"}
"""Nobody upgrades across these with jobs running: there was no release before them."""


def revisions() -> list[str]:
    script = ScriptDirectory(str(HOME / "migrations"))
    return [revision.revision for revision in reversed(list(script.walk_revisions()))]


def tables(database: Database) -> set[str]:
    with database.read() as session:
        return set(inspect(session.connection()).get_table_names()) - {"alembic_version"}


def test_every_step_up_only_expands_and_there_is_a_way_down_and_up_again(empty_url: str) -> None:
    database = Database(empty_url)
    assert migrate.current(database) is None
    before: schemas.Schema = {}
    assert [script.revision for script in migrate.history()] == revisions()
    for script in migrate.history():
        migrate.upgrade(database, script.revision)
        assert migrate.current(database) == script.revision
        after = schemas.read(database)
        # A contraction is of a release that says from which version on the database can be used.
        if script.revision not in BEFORE_THE_RULE and getattr(script.module, "works_from", "") != script.revision:
            faults = schemas.contractions(before, after)
            assert not faults, f"{script.revision}: {'; '.join(faults)}. See docs/operations.md, Upgrade"
        before = after
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
    def program(_: Database) -> int:
        os.environ |= {"EFT_DATABASE_URL": empty_url, "EFT_DATA": str(tmp_path)}
        settings.cache_clear()
        private.umask()
        return migrate.bring_forward()

    database = Database(empty_url)
    assert at_once(database, program, program, program) == [0] * 3
    assert migrate.current(database) == migrate.head()
    database.dispose()
