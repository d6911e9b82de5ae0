"""What is cleared away after its time, on both databases."""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import insert, select, update

from core.db.engine import Database, db_now
from core.db.tables import File, IdempotencyKey, Project
from core.ids import made_at, new_id
from core.jobs.housekeeping import forget_answers
from core.storage.layout import Layout
from tests.db.conftest import ADA
from worker.upkeep.housekeeping import remove_orphans


def remember(database: Database, key: str, hours_ago: float) -> None:
    row = {"project_id": ADA.project_id, "owner_id": ADA.user_id, "request_sha256": "0" * 64, "status": 201, "body": {}}
    with database.write() as session:
        session.execute(insert(IdempotencyKey).values(key=key, created_at=db_now() - hours_ago * 3600, **row))


def keys(database: Database) -> set[str]:
    with database.read() as session:
        return set(session.execute(select(IdempotencyKey.key)).scalars())


def test_answers_are_kept_for_their_hours_and_then_forgotten_oldest_first(database: Database) -> None:
    for key, hours in (("new", 0), ("day", 47.9), ("old", 48.1), ("older", 100), ("oldest", 1000)):
        remember(database, key, hours)
    with database.write() as session:
        assert forget_answers(session, 48, limit=2) == 2
    assert keys(database) == {"new", "day", "old"}
    with database.write() as session:
        assert forget_answers(session, 48, limit=2) == 1
        assert forget_answers(session, 48, limit=2) == 0
    assert keys(database) == {"new", "day"}


def test_files_that_no_row_names_go_after_a_day_and_others_never(database: Database, tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.create()
    named, orphan, young = new_id("file"), new_id("file"), new_id("file")
    for file_id in (named, orphan, young):
        layout.file(file_id).write_text("{}")
    (layout.files / "notes.txt").write_text("somebody's own")
    model = new_id("upload")  # whose API was killed before its row
    layout.artifacts(model, 1).mkdir(parents=True)
    row = {"filename": "a", "bytes": 2, "sha256": "0" * 64, "rows": 1, "format": "text"}
    with database.write() as session:
        session.execute(insert(File).values(id=named, owner_id="user-ada", project_id="proj-lab", **row))
    assert remove_orphans(database, layout) == [], "a day has not passed"
    with database.write() as session:
        session.execute(update(Project).values(created_at=db_now() + 60))
    assert remove_orphans(database, layout, older_than=-1.0) == [], "they are of another database"
    with database.write() as session:
        session.execute(update(Project).values(created_at=db_now() - 60))
    assert sorted(remove_orphans(database, layout, older_than=-1.0)) == sorted([orphan, young, model])
    assert not list(layout.runs.iterdir())
    assert sorted(path.name for path in layout.files.iterdir()) == sorted([named, "notes.txt"])


def test_an_id_says_when_it_was_made() -> None:
    assert abs(made_at(new_id("file")) - time.time()) < 60
