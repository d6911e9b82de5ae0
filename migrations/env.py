"""Alembic's entry: migrate the database that the settings (or `-x url=…`) name."""

from pathlib import Path

from alembic import context
from sqlalchemy import text

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base
from core.settings import settings

database: Database | None = context.config.attributes.get("database")
if database is None:
    database = Database(context.get_x_argument(as_dictionary=True).get("url") or settings().sqlalchemy_url)

with database.write() as session:
    if not database.is_sqlite:  # SQLite's BEGIN IMMEDIATE already lets one process in at a time
        session.execute(text("select pg_advisory_xact_lock(6710614)"))
    context.configure(
        connection=session.connection(),
        target_metadata=Base.metadata,
        render_as_batch=database.is_sqlite,
        transactional_ddl=False,
    )
    context.run_migrations()
    migrate.record_floor(session, Path(context.script.dir))
