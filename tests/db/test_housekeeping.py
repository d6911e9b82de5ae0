"""What is cleared away after its time, on both databases."""

from __future__ import annotations

from sqlalchemy import insert, select

from core.db.engine import Database, db_now
from core.db.tables import IdempotencyKey
from core.jobs.housekeeping import forget_answers
from tests.db.conftest import ADA


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
