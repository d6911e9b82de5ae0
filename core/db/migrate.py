"""Bring a database to this version's schema: `python -m core.db.migrate` (or `eft migrate`)."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from core import HOME
from core.db.engine import Database
from core.settings import settings


def _config(database: Database) -> Config:
    config = Config()
    config.set_main_option("script_location", str(HOME / "migrations"))
    config.attributes["database"] = database
    return config


def upgrade(database: Database, revision: str = "head") -> None:
    """Run the missing migrations, one transaction in all. Several processes may call it at once; one of them works."""
    command.upgrade(_config(database), revision)


def downgrade(database: Database, revision: str) -> None:
    command.downgrade(_config(database), revision)


def head() -> str:
    """The revision this code was written for."""
    revision = ScriptDirectory(str(HOME / "migrations")).get_current_head()
    assert revision is not None
    return revision


def current(database: Database) -> str | None:
    """The revision the database is at; None for an empty one."""
    with database.read() as session:
        return MigrationContext.configure(session.connection()).get_current_revision()


if __name__ == "__main__":
    database = Database(settings().sqlalchemy_url)
    settings().root.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = current(database)
    upgrade(database)
    print(f"schema: {before or 'empty'} -> {current(database)}")
