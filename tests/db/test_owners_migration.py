"""0005 on a database that was in use: nobody loses access; and the way back gives nobody more than they had."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import text

from core.db import migrate
from core.db.engine import Database

USERS = [("user-b", "bob", 2.0), ("user-a", "ada", 1.0), ("user-c", "carol", 3.0), ("user-z", "zoe", 0.5)]
KEYS = [
    # id, owner, project, revoked
    ("key-1", "user-a", "proj-1", None),
    ("key-2", "user-b", "proj-1", None),
    ("key-3", "user-b", "proj-2", None),
    ("key-4", "user-z", "proj-2", 5.0),
]


@pytest.fixture
def old(empty_url: str) -> Any:
    """As version 0004 left it: zoe came first and has no key any more, carol has a file alone."""
    database = Database(empty_url)
    migrate.upgrade(database, "0004")
    with database.write() as session:
        for number, name, when in USERS:
            session.execute(
                text("INSERT INTO users (id, name, created_at) VALUES (:i, :n, :t)"),
                {"i": number, "n": name, "t": when},
            )
        for number in ("proj-1", "proj-2"):
            session.execute(text("INSERT INTO projects (id, name, created_at) VALUES (:i, :i, 1.0)"), {"i": number})
        for number, owner, project, revoked in KEYS:
            session.execute(
                text(
                    "INSERT INTO api_keys (id, name, prefix, sha256, created_at, revoked_at, owner_id, project_id) "
                    "VALUES (:i, 'k', :i, 'x', 1.0, :r, :o, :p)"
                ),
                {"i": number, "o": owner, "p": project, "r": revoked},
            )
        session.execute(
            text(
                "INSERT INTO files (id, filename, bytes, sha256, rows, format, created_at, owner_id, project_id) "
                "VALUES ('file-1', 'f', 1, 'x', 1, 'text', 1.0, 'user-c', 'proj-2')"
            )
        )
        session.execute(
            text(
                "INSERT INTO audit (id, time, action, target, request_id, data, owner_id, project_id) "
                "VALUES ('audit-1', 1.5, 'node.drain', 'box', 'req-1', :d, 'user-b', 'proj-2')"
            ),
            {"d": json.dumps({"reason": "fan"})},
        )
    yield database
    database.dispose()


def rows(database: Database, query: str) -> list[tuple[Any, ...]]:
    with database.read() as session:
        return [tuple(row) for row in session.execute(text(query))]


def test_nobody_loses_access(old: Database) -> None:
    migrate.upgrade(old, "0005")
    assert rows(old, "SELECT user_id, project_id, role FROM memberships ORDER BY 1, 2") == [
        ("user-a", "proj-1", "admin"),
        ("user-b", "proj-1", "admin"),
        ("user-b", "proj-2", "admin"),
        ("user-c", "proj-2", "admin"),
        ("user-z", "proj-2", "admin"),
    ]
    # The first user who can still come in looks after the box.
    assert rows(old, "SELECT id FROM users WHERE box_admin") == [("user-a",)]
    assert rows(old, "SELECT id, scope, expires_at, revoked_at FROM api_keys ORDER BY 1") == [
        ("key-1", "box", None, None),
        ("key-2", "admin", None, None),
        ("key-3", "admin", None, None),
        ("key-4", "admin", None, 5.0),
    ]
    (entry,) = rows(old, "SELECT id, time, action, target, actor_id, key_id, project_id, request_id, data FROM audit")
    assert entry[:8] == ("audit-1", 1.5, "node.drain", "box", "user-b", None, None, "req-1")
    assert (json.loads(entry[8]) if isinstance(entry[8], str) else entry[8]) == {"reason": "fan"}


def test_the_way_back_gives_nobody_more(old: Database) -> None:
    migrate.upgrade(old, "0005")
    with old.write() as session:
        session.execute(
            text("UPDATE memberships SET role = 'viewer' WHERE user_id = 'user-b' AND project_id = 'proj-2'")
        )
        session.execute(
            text("UPDATE memberships SET role = 'member' WHERE user_id = 'user-b' AND project_id = 'proj-1'")
        )
        for number, values in (("5", "'read', NULL"), ("6", "'admin', 9e9"), ("7", "'write', NULL")):
            session.execute(
                text(
                    "INSERT INTO api_keys "
                    "(id, name, prefix, sha256, created_at, owner_id, project_id, scope, expires_at) "
                    f"VALUES ('key-{number}', 'k', 'p{number}', 'x', 1.0, 'user-a', 'proj-1', {values})"
                )
            )
        session.execute(
            text("INSERT INTO audit (id, time, action, target, data) VALUES ('audit-2', 2.5, 'user.create', 'x', '{}')")
        )
    migrate.downgrade(old, "0004")
    working = rows(old, "SELECT id FROM api_keys WHERE revoked_at IS NULL ORDER BY 1")
    assert working == [("key-1",), ("key-2",), ("key-7",)], "not a viewer's, not a read key, not one that would expire"
    # What the box did by itself has no place there; a drain gets one of its user's projects again.
    assert rows(old, "SELECT id, owner_id, project_id FROM audit") == [("audit-1", "user-b", "proj-1")]
    migrate.upgrade(old)
    assert rows(old, "SELECT id FROM users WHERE box_admin") == [("user-a",)]
