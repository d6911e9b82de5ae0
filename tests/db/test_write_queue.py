"""SQLite's writers of one process: first come, first served, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from core.db import engine
from core.db.engine import Database, WriteQueue


def test_first_come_first_served(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    served: list[int] = []

    def write(number: int) -> None:
        with database.write() as session:
            served.append(number)
            session.execute(text("select 1"))

    with database.write(), ThreadPoolExecutor(8) as pool:
        assert database._queue is not None
        for number in range(8):
            pool.submit(write, number)
            while len(database._queue._waiting) <= number:
                time.sleep(0.001)
        threading.Timer(0.05, lambda: served.append(-1)).start()
        while not served:
            time.sleep(0.001)
        # the pool's end waits for the writers, who wait for us: let them in first
        database._queue.release()
        pool.shutdown(wait=True)
        assert database._queue.acquire(1)
    assert served == [-1, *range(8)]
    assert database._queue.acquire(0), "free at the end"
    database.dispose()


def test_a_turn_that_does_not_come_is_told_as_sqlite_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.05)
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    with database.write() as session:
        session.execute(text("create table t (x)"))
        with ThreadPoolExecutor(1) as pool:

            def write() -> None:
                with database.write() as other:
                    other.execute(text("insert into t values (1)"))

            with pytest.raises(OperationalError, match="database is locked"):
                pool.submit(write).result(90)
    with database.write() as session:
        session.execute(text("insert into t values (2)"))
    with database.read() as session:
        assert session.execute(text("select x from t")).scalars().all() == [2]
    database.dispose()


def test_an_error_in_the_block_frees_the_turn(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    for _ in range(2):
        with pytest.raises(RuntimeError), database.write():
            raise RuntimeError
    database.dispose()


def test_turns_under_contention_are_never_shared() -> None:
    turns, inside, most = WriteQueue(), [0], [0]

    def work(number: int) -> int:
        done = 0
        for attempt in range(200):
            if not turns.acquire(0.0001 * (attempt % 3)):
                continue
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            inside[0] -= 1
            done += 1
            turns.release()
        return done

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(work, range(6)))
    assert most == [1] and sum(done) > 0
    assert turns.acquire(0) and not turns.acquire(0)
