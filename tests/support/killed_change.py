"""A change of the database in a process that is killed before its n-th statement or commit."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

from sqlalchemy import event

from core.db.engine import Database


def killed(database: Database, change: Callable[[Database], object], at: int) -> bool:
    """Run `change` in a process of its own, which is killed at its `at`-th statement or commit, or after it. False:
    there is no such point, and it came to its end."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_statements, args=(url_of(database), change, at))
    process.start()
    process.join(60)
    assert process.exitcode in (-signal.SIGKILL, 0), process.exitcode
    return process.exitcode != 0


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def _statements(url: str, change: Callable[[Database], object], kill_at: int) -> None:
    database, seen = Database(url), 0

    def point(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for engine in {database._writer, database._reader}:
        event.listen(engine, "before_cursor_execute", point)
        event.listen(engine, "commit", point)
    change(database)
    point()  # it is committed; the process ends before it knows
    os._exit(0)
