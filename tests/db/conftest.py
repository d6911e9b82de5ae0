"""Tests of this suite run on SQLite and on PostgreSQL: claims, leases, races, ordering, JSON, locks, migrations.

A test that is marked `one_database` asks nothing of the database in which the two differ, and runs on SQLite alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import delete, insert, select

from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base, Job, Project, User
from core.jobs.lifecycle.submit import Actor, submit
from core.spec.job import JobSpec
from core.spec.resolve import resolve
from core.storage.layout import Layout
from tests.support.lab import Lab
from tests.support.selection import EVERYTHING

ADA = Actor("user-ada", "proj-lab")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_database: run on SQLite alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if EVERYTHING:
        return
    again = {item for item in items if item.get_closest_marker("one_database") and "postgresql" in item.name}
    config.hook.pytest_deselected(items=list(again))
    items[:] = [item for item in items if item not in again]


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of its own, without any table."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'eft.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(scope="session")
def template(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, Path]]:
    """Call it with a kind of database for one with the schema and nothing else, its URL and (of SQLite) its file: it is
    copied, which takes a tenth of migrating."""

    @cache
    def migrated_once(kind: str) -> tuple[str, Path]:
        path = tmp_path_factory.mktemp("template") / "eft.db"
        url = f"sqlite:///{path}" if kind == "sqlite" else request.getfixturevalue("postgres_databases")()
        database = Database(url)
        migrate.upgrade(database)
        database.dispose()
        return url, path

    return migrated_once


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def copied_url(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    template: Callable[[str], tuple[str, Path]],
) -> Callable[[], str]:
    """Call it for the URL of a new database with the schema and nothing else."""
    like, file = template(request.param)

    def copy() -> str:
        if request.param == "postgresql":
            url: str = request.getfixturevalue("postgres_databases")(like)
            return url
        path = tmp_path_factory.mktemp("sqlite") / "eft.db"
        shutil.copyfile(file, path)
        return f"sqlite:///{path}"

    return copy


@pytest.fixture(scope="module")
def migrated(copied_url: Callable[[], str]) -> Iterator[Database]:
    """One a module and kind of database."""
    database = Database(copied_url())
    yield database
    database.dispose()


@pytest.fixture
def database(migrated: Database) -> Database:
    """The schema, a user, a project, and nothing else."""
    with migrated.write() as session:
        for table in reversed(Base.metadata.sorted_tables):
            session.execute(delete(table))
        session.execute(insert(User).values(id=ADA.user_id, name="ada"))
        session.execute(insert(Project).values(id=ADA.project_id, name="lab"))
    return migrated


@pytest.fixture
def make_job(database: Database) -> Callable[..., str]:
    """A queued job; `prepared=True`: its model is there already."""

    def make(*, prepared: bool = True, accelerator: str = "any") -> str:
        spec = JobSpec.model_validate(
            {
                "model": "team/tiny",
                "data": "file-0123456789abcdefghjkmnpqrs",
                "resources": {"type": "single", "accelerator": accelerator},
            }
        )
        with database.write() as session:
            job = submit(session, ADA, resolve(spec))
            if prepared:
                session.get_one(Job, job.id).prepared = {"model_dir": "/models/tiny"}
            return job.id

    return make


@pytest.fixture
def row(database: Database) -> Callable[[str], Job]:
    """The job as it is in the database now."""

    def read(job_id: str) -> Job:
        with database.read() as session:
            return session.execute(select(Job).where(Job.id == job_id)).scalar_one()

    return read


@pytest.fixture
def lab(database: Database) -> Lab:
    return Lab(database)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    found = Layout(tmp_path / "data")
    found.create()
    return found
