"""What an installation has run, as a week for `python -m bench.lab --trace`: `python -m bench.lab.record [--db URL]
[--from 2026-11-16] [--days 7] > week.csv`.

A row a job that was submitted in those days and had GPUs (or CPU slots): when, how many, for how long in all, its time
limit and priority. Owners become `u00`, `u01` … in the order in which they came, jobs `j0000` …; no name, no id and
nothing of a spec is in it. Only final jobs count, since what runs has no length yet; how many were left out is told.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from bench.lab.week import DAY, Task, write
from core.db.engine import Database
from core.db.tables import Allocation, Job
from core.jobs.base.states import FINAL


def recorded(session: Session, since: float, until: float) -> tuple[list[Task], int]:
    """(tasks by the time of their submit, jobs of that time that were left out)."""
    spans = (
        select(
            Allocation.job_id,
            Allocation.attempt,
            func.count().label("slots"),
            (func.max(Allocation.released_at) - func.min(Allocation.created_at)).label("seconds"),
        )
        .where(Allocation.billing > 0, Allocation.released_at.is_not(None))  # training; preparing is charged to nobody
        .group_by(Allocation.job_id, Allocation.attempt)
        .subquery()
    )
    held = (
        select(spans.c.job_id, func.max(spans.c.slots).label("slots"), func.sum(spans.c.seconds).label("seconds"))
        .group_by(spans.c.job_id)
        .subquery()
    )
    rows = session.execute(
        select(Job.owner_id, Job.created_at, Job.status, Job.priority, Job.spec, held.c.slots, held.c.seconds)
        .outerjoin(held, held.c.job_id == Job.id)
        .where(Job.kind == "train", Job.created_at >= since, Job.created_at < until)
        .order_by(Job.created_at, Job.id)
    ).all()
    names: dict[str, str] = {}
    tasks: list[Task] = []
    for row in rows:
        if row.status not in FINAL or not row.seconds or row.seconds <= 0:
            continue
        owner = names.setdefault(row.owner_id, f"u{len(names):02d}")
        at = max(row.created_at - since, tasks[-1].submit + 1e-3 if tasks else 0.0)
        limit = row.spec.get("resources", {}).get("max_runtime_seconds")
        seconds = float(max(1, round(row.seconds)))
        tasks.append(Task(f"j{len(tasks):04d}", owner, at, row.slots, seconds, limit, row.priority))
    return tasks, len(rows) - len(tasks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--db", help="SQLAlchemy URL. Default: this installation's (EFT_DATABASE_URL, EFT_DATA)")
    parser.add_argument("--from", dest="since", type=datetime.fromisoformat, help="first day, UTC. Default: a week ago")
    parser.add_argument("--days", type=float, default=7.0)
    options = parser.parse_args()
    url = options.db
    if url is None:
        from core.settings import settings

        url = settings().sqlalchemy_url
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    since = (options.since or midnight - timedelta(days=options.days)).replace(tzinfo=UTC).timestamp()
    database = Database(url)
    with database.read() as session:
        tasks, left_out = recorded(session, since, since + options.days * DAY)
    database.dispose()
    write(tasks, sys.stdout)
    print(f"{len(tasks)} jobs; {left_out} left out: not over yet, or they never had a slot", file=sys.stderr)


if __name__ == "__main__":
    main()
