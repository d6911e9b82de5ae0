"""What the queue costs: `python -m bench.queue [--db postgresql|URL] [--runs N]`.

- a claim with 10,000 and 100,000 jobs of 50 owners waiting against one with 100 (flat is a ratio near 1), with the
  query plan;
- events relayed from a trainer against a bare executemany of the same rows;
- outbox rows relayed per second against the same number of bare deletes.

The default database is SQLite in a temporary folder, set up as the service does (WAL, synchronous FULL);
`--db postgresql` is a server of this process with its default durability.
"""

from __future__ import annotations

import argparse
import sqlite3
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from bench.report import compare, finish, in_turn, show
from core.db import migrate
from core.db.engine import Database
from core.db.tables import Base, Event, Job, OutboxMessage, Project, UsageTotal, User
from core.ids import new_id
from core.jobs.base import outbox
from core.jobs.lifecycle import claims, relay
from core.jobs.lifecycle.claims import Slot
from core.jobs.scheduling import queue_order
from tests.support import postgres

OWNED = {"owner_id": "user-1", "project_id": "project-1"}
OWNERS = 50


def _empty(database: Database) -> None:
    """Without a look at foreign keys: to delete 100,000 jobs with them takes minutes."""
    names = [table.name for table in reversed(Base.metadata.sorted_tables)]
    if database.is_sqlite:
        with sqlite3.connect(str(database.url.database)) as plain:  # enforces none unless it is asked to
            for name in names:
                plain.execute(f"DELETE FROM {name}")  # noqa: S608 -- our own tables' names
    else:
        with database.write() as session:
            session.execute(text(f"TRUNCATE {', '.join(names)}"))


def fill(database: Database, count: int) -> None:
    """Empty the database, then queue `count` jobs that are ready for a slot."""
    _empty(database)
    with database.write() as session:
        owners = [{"id": f"user-{number}", "name": f"bench-{number}"} for number in range(OWNERS)]
        session.execute(insert(User), owners)
        session.execute(insert(Project).values(id="project-1", name="bench"))
        session.execute(
            insert(UsageTotal),
            [{"owner_id": one["id"], "project_id": "project-1", "billed": 100.0, "at": 0.0} for one in owners],
        )
        row = {
            "spec": {},
            "accelerator": "any",
            "status": "queued",
            "reason": "",
            "prepared": {"model_dir": "/m"},
            "resume_from": [],
            "project_id": "project-1",
        }
        for start in range(0, count, 1000):
            times = range(start, min(start + 1000, count))
            session.execute(
                insert(Job),
                [
                    {"id": new_id("job"), "created_at": float(number), "owner_id": f"user-{number % OWNERS}", **row}
                    for number in times
                ],
            )
        session.execute(text("ANALYZE"))


def claim_seconds(database: Database, count: int, offset: int) -> float:
    """Median time of one claim, committed as the worker does it."""
    took = []
    for number in range(count):
        began = time.perf_counter()
        with database.write() as session:
            claimed = claims.claim(session, "worker-1", "node-1", Slot(f"slot-{offset + number}", "gpu"), 90)
        took.append(time.perf_counter() - began)
        if claimed is None:
            raise SystemExit("the queue ran empty")
    return statistics.median(took)


def plan(database: Database) -> list[str]:
    """The database's own account of how it finds the next job."""
    query = queue_order.heads("train", queue_order.ready(0.0, None, None))
    compiled = str(query.compile(database._writer, compile_kwargs={"literal_binds": True}))
    with database.read() as session:
        prefix = "EXPLAIN QUERY PLAN " if database.is_sqlite else "EXPLAIN "
        return [str(row[-1]) for row in session.execute(text(prefix + compiled))]


def events_per_second(database: Database, token: Any, step: list[int], size: int = 500) -> float:
    lines = [{"seq": n, "time": 1.0, "type": "notice", "code": "bench", "message": "x" * 40} for n in range(size)]
    began = time.perf_counter()
    with database.write() as session:
        if not relay.relay(session, token, relay.EventBatch(step[0], lines)):
            raise SystemExit("the lease was lost")
    step[0] += size
    return size / (time.perf_counter() - began)


def bare_rows_per_second(database: Database, job_id: str, step: list[int], size: int = 500) -> float:
    row = {"job_id": job_id, "attempt": 0, "type": "notice", "data": {"code": "bench", "message": "x" * 40}, **OWNED}
    began = time.perf_counter()
    with database.write() as session:
        session.execute(insert(Event), [{**row, "seq": 10_000_000 + step[0] + n, "time": 1.0} for n in range(size)])
    step[0] += size
    return size / (time.perf_counter() - began)


def outbox_per_second(database: Database, size: int = 500) -> float:
    with database.write() as session:
        _messages(session, size)
    began = time.perf_counter()
    outbox.relay(database, lambda job_id: None, limit=size)
    return size / (time.perf_counter() - began)


def bare_deletes_per_second(database: Database, size: int = 500) -> float:
    with database.write() as session:
        _messages(session, size)
    began = time.perf_counter()
    with database.write() as session:
        session.execute(text("DELETE FROM outbox"))
    return size / (time.perf_counter() - began)


def _messages(session: Session, size: int) -> None:
    session.execute(
        insert(OutboxMessage), [{"id": new_id("msg"), "job_id": "job-1", "created_at": 1.0} for _ in range(size)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--db", help="`postgresql`, or the SQLAlchemy URL of an empty database; it is filled and emptied"
    )
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eft-bench-") as folder, ExitStack() as stack:
        if options.db == "postgresql":
            options.db = stack.enter_context(postgres.databases("-c", "fsync=on"))()
        database = Database(options.db or f"sqlite:///{Path(folder) / 'bench.db'}")
        migrate.upgrade(database)
        kind = "sqlite" if database.is_sqlite else "postgresql"
        results: dict[str, dict[str, Any]] = {}
        small, claimed = [], 0
        for waiting in (100, 10_000, 100_000):
            fill(database, waiting)
            figures = []
            for _ in range(options.runs):
                figures.append(claim_seconds(database, 10, claimed))
                claimed += 10
            if waiting == 100:
                small = figures
                continue
            name = f"claim_seconds_{kind}_{waiting}_waiting_against_100"
            results[name] = compare(figures, small)
            show(name, results[name], "s")
            print("  plan:", "; ".join(plan(database)))
        fill(database, 1)
        with database.write() as session:
            claim = claims.claim(session, "worker-1", "node-1", Slot("gpu-0", "gpu"), 3600)
        assert claim is not None
        step = [0]
        job_id = claim.token.job_id
        name = f"events_per_second_{kind}_against_bare_insert"
        results[name] = in_turn(
            lambda: events_per_second(database, claim.token, step),
            lambda: bare_rows_per_second(database, job_id, step),
            options.runs,
        )
        show(name, results[name], "/s")
        name = f"outbox_per_second_{kind}_against_bare_delete"
        results[name] = in_turn(
            lambda: outbox_per_second(database), lambda: bare_deletes_per_second(database), options.runs
        )
        show(name, results[name], "/s")
        database.dispose()
    finish(results)


if __name__ == "__main__":
    main()
