"""Migrations only expand: the workers of the version before go on while, and after, a newer one migrates.

docs/operations.md states the rule, and test_migrations.py holds every migration to it. Here: what finds a contraction,
and which versions of the code use which schema.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import insert, select, text

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base, Job, Project, SchemaFloor, User
from tests.support import schemas
from tests.support.next_schema import EXPANDS, next_schema

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


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """As `next_schema`, each made and read once for both databases."""
    return cache(lambda *body: next_schema(tmp_path_factory.mktemp("next") / "migrations", *body))


def test_what_contracts_is_found(copied_url: Callable[[], str], following: Callable[..., Path]) -> None:
    """Each kind of contraction, as the next migration would do it."""
    whole = Database(copied_url())
    before = schemas.read(whole)
    whole.dispose()
    assert schemas.contractions(before, before) == []
    expected = {name: (f"    {body}", fault) for name, (body, fault) in CONTRACTIONS.items()} | {"none": (EXPANDS, "")}
    for name, (body, fault) in expected.items():
        database = Database(copied_url())
        migrate.upgrade(database, scripts=following(body))
        faults = schemas.contractions(before, schemas.read(database))
        assert any(fault in one for one in faults) if fault else faults == [], f"{name}: {faults}"
        database.dispose()


def test_code_of_this_version_goes_on_with_the_next_schema(
    copied_url: Callable[[], str], following: Callable[..., Path], make: Callable[..., str]
) -> None:
    database = Database(copied_url())
    make(database, "before")
    migrate.upgrade(database, scripts=following(EXPANDS))
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


def test_a_schema_that_is_too_new_is_refused_in_words(
    copied_url: Callable[[], str], following: Callable[..., Path]
) -> None:
    database = Database(copied_url())
    migrate.upgrade(database, scripts=following(EXPANDS, "works_from = 'next'"))
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
