"""Uploads stay within the budgets of the data root (core/jobs/policies/budget.py)."""

from __future__ import annotations

from core.db.engine import Database
from core.errors import NoSpace
from core.jobs.policies import budget
from core.jobs.policies.budget import Budget
from core.settings import Settings


def require(database: Database, settings: Settings, announced: int) -> None:
    """Raises NoSpace while the budget of uploads, or of everything, is used up or would be with so many bytes more."""
    limits = Budget.of(settings)
    if not {"uploads", "total"} & limits.limits.keys():
        return
    with database.read() as session:
        used = budget.measured(session)
    used["uploads"] += announced
    for over in limits.over(used):
        if over.kind in ("uploads", "total"):
            raise NoSpace(
                f"with this file {over.words()}: delete files that no job needs, or ask the administrator for room",
                field="file",
            )
