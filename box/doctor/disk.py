"""What the data root holds against its budgets, as the leading worker has measured it last."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import select
from sqlalchemy.engine import make_url

from box.doctor.report import Report
from core.db import migrate
from core.db.engine import Database
from core.db.tables import DiskUsage
from core.jobs.policies import budget
from core.jobs.policies.budget import Budget
from core.settings import Settings


def look(report: Report, settings: Settings) -> None:
    """Empty if there is no database yet, or another version's: earlier parts report that."""
    url = make_url(settings.sqlalchemy_url)
    if url.get_backend_name() == "sqlite" and not (url.database and Path(url.database).exists()):
        return
    database, limits = Database(settings.sqlalchemy_url), Budget.of(settings)
    try:
        if not migrate.standing(database).fit:
            return
        with database.read() as session:
            used = budget.measured(session)
            known = session.execute(select(DiskUsage.kind).limit(1)).first() is not None
    finally:
        database.dispose()
    if not known:
        report.add("ok", "disk", "not measured yet: a worker does, minutes after its start")
        return
    parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in used.items() if size)
    report.add("ok", "disk", f"the data root holds {sum(used.values()) / 1e9:.1f} GB ({parts or 'nothing'})")
    for over in limits.over(used):
        report.add(
            "problem",
            "disk",
            f"{over.words()}: nothing is started. `eft delete`, `eft files rm` and `eft gc` make room",
        )
    if not limits.limits:
        report.add("note", "disk", "no budget: jobs may fill the disk up to EFT_MIN_FREE_BYTES (EFT_DISK_BUDGET_BYTES)")
