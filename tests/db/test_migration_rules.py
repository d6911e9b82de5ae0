"""Migrations only expand: the workers of the version before go on while, and after, a newer one migrates.

docs/operations.md states the rule. Here every migration is run on both databases, and the schemas before and after are
compared; what came before the rule is named.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base, Job, Project, SchemaFloor, User
from tests.support import schemas
from tests.support.next_schema import EXPANDS, next_schema

BEFORE_THE_RULE = {"0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008"}
"""Nobody upgrades across these with jobs running: there was no release before them."""
CONTRACTIONS = {
    "column": ("op.drop_column('jobs', 'adjusted')", "column jobs.adjusted is gone"),
    "table": ("op.drop_table('outbox')", "table outbox is gone"),
    "name": ("op.alter_column('jobs', 'losses', new_column_name='lost')", "column jobs.losses is gone"),
    "type": (
        "with op.batch_alter_table('jobs') as jobs:\n"
        "        jobs.alter_column('losses', type_=sa.String(9), postgresql_using='losses::text')",
        "jobs.losses was INTEGER and is VARCHAR(9)",
    ),
    "null": ("with op.batch_alter_table('nodes') as nodes:\n        nodes.alter_column('drained_at', nullable=False)",
             "nodes.drained_at may be null no more"),
    "default": (
        "op.add_column('outbox', sa.Column('mood', sa.String(8), nullable=False, server_default='x'))\n"
        "    with op.batch_alter_table('outbox') as outbox:\n"
        "        outbox.alter_column('mood', server_default=None)",
        "outbox.mood is new, NOT NULL and has no default",
    ),
    "unique": ("op.create_index('uq', 'files', ['project_id', 'sha256'], unique=True)", "files must be unique in"),
}  # fmt: skip


def test_every_migration_only_expands(empty_url: str) -> None:
    database = Database(empty_url)
    before: schemas.Schema = {}
    for script in migrate.history():
        migrate.upgrade(database, script.revision)
        after = schemas.read(database)
        # A contraction is of a release that says from which version on the database can be used.
        if script.revision not in BEFORE_THE_RULE and getattr(script.module, "works_from", "") != script.revision:
            faults = schemas.contractions(before, after)
            assert not faults, f"{script.revision}: {'; '.join(faults)}. See docs/operations.md, Upgrade"
        before = after
    database.dispose()


def test_what_contracts_is_found(empty_url: str, tmp_path: Path) -> None:
    """Each kind of contraction, as the next migration would do it, in a transaction that is taken back."""
    database = Database(empty_url)
    migrate.upgrade(database)
    before = schemas.read(database)
    assert schemas.contractions(before, before) == []
    for name, (body, fault) in CONTRACTIONS.items():
        migrate.upgrade(database, scripts=next_schema(tmp_path / name, f"    {body}"))
        faults = schemas.contractions(before, schemas.read(database))
        assert any(fault in one for one in faults), f"{name}: {faults}"
        _start_anew(database)
    migrate.upgrade(database, scripts=next_schema(tmp_path / "expands"))
    assert schemas.contractions(before, schemas.read(database)) == []
    database.dispose()


def _start_anew(database: Database) -> None:
    with database.write() as session:
        if database.is_sqlite:
            session.execute(text("PRAGMA defer_foreign_keys=ON"))
            for (name,) in session.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all():
                session.execute(text(f'DROP TABLE "{name}"'))
        else:
            session.execute(text("DROP SCHEMA public CASCADE"))
            session.execute(text("CREATE SCHEMA public"))
    database.dispose()
    migrate.upgrade(database)


def test_code_of_this_version_goes_on_with_the_next_schema(
    empty_url: str, tmp_path: Path, make: Callable[..., str]
) -> None:
    database = Database(empty_url)
    migrate.upgrade(database)
    make(database, "before")
    migrate.upgrade(database, scripts=next_schema(tmp_path / "next"))
    standing = migrate.standing(database)
    assert (standing.current, standing.fit, standing.newer) == ("next", True, True)
    assert "can still use it" in standing.words
    make(database, "after")
    migrate.upgrade(database)  # what `eft up` of this version does: leaves it as it is
    assert migrate.current(database) == "next"
    with database.read() as session:
        assert sorted(session.execute(select(Job.name)).scalars()) == ["after", "before"]
        assert session.execute(text("SELECT DISTINCT mood FROM jobs")).scalars().all() == ["calm"]
    database.dispose()


def test_a_schema_that_is_too_new_is_refused_in_words(empty_url: str, tmp_path: Path) -> None:
    database = Database(empty_url)
    migrate.upgrade(database)
    migrate.upgrade(database, scripts=next_schema(tmp_path / "next", EXPANDS, "works_from = 'next'"))
    standing = migrate.standing(database)
    assert not standing.fit and standing.newer
    assert "bring this box to the same version" in standing.words and "only those from next on" in standing.words
    with pytest.raises(migrate.NewerSchema, match="bring this box to the same version"):
        migrate.upgrade(database)
    database.dispose()


def test_a_schema_that_is_too_old_or_missing_is_refused_in_words(empty_url: str) -> None:
    database = Database(empty_url)
    assert not migrate.standing(database).fit
    migrate.upgrade(database, "0007")
    standing = migrate.standing(database)
    assert not standing.fit and not standing.newer
    assert standing.words == f"is at 0007, this version needs {migrate.head()}: run `eft migrate`"
    migrate.upgrade(database)
    assert migrate.standing(database).fit
    with database.read() as session:
        assert session.execute(select(SchemaFloor.works_from)).scalars().all() == ["0009"]
    database.dispose()


@pytest.fixture
def make() -> Callable[..., str]:
    """Insert a job as this version's code does, through its tables."""

    def made(database: Database, name: str) -> str:
        with database.write() as session:
            if session.get(User, "user-a") is None:
                session.execute(insert(User).values(id="user-a", name="ada"))
                session.execute(insert(Project).values(id="proj-a", name="lab"))
            session.execute(
                insert(Base.metadata.tables["jobs"]).values(
                    id=f"job-{name}", name=name, spec={}, accelerator="any", resume_from=[], status="queued",
                    owner_id="user-a", project_id="proj-a", kind="train", priority=0, queue_key="", reason="",
                    attempt=0, machine_failures=0, losses=0, full_disks=0, furthest_step=0, event_seq=0, created_at=0.0,
                )
            )  # fmt: skip
            return f"job-{name}"

    return made
