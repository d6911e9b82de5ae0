"""Keeping the data root within its budgets: what may go goes first, and only then does anybody have to wait.

In this order, and no further than is needed: entries of the cache that no job uses, what the rules of retention let go
anyhow, then checkpoints and previews of jobs that ended long enough ago (EFT_BUDGET_KEEP_HOURS), oldest first. Nothing
goes that a job in progress may need, nor what a job has handed back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from core import caches
from core.db.engine import Database
from core.jobs.lifecycle import retention
from core.jobs.lifecycle.retention import Removal, RetentionRules
from core.jobs.policies import budget
from core.jobs.policies.budget import Budget, Over
from core.settings import Settings
from core.storage.layout import Layout
from worker.upkeep import disk_usage

log = logging.getLogger("eft.housekeeping")


def reclaim(
    database: Database, layout: Layout, settings: Settings, stopped: Callable[[], bool] = lambda: False
) -> tuple[Over, ...]:
    """Measure, and let go what is beyond a budget as far as anything may go. Returns the budgets still used up."""
    disk_usage.measure(database, layout)
    limits = Budget.of(settings)
    over = _state(database, limits)
    if not over:
        return ()
    if total := _beyond(over, "total"):
        if gone := caches.free(layout.cache, total):
            log.info("removed %d entries of the cache (EFT_DISK_BUDGET_BYTES)", len(gone))
        over = _measured(database, layout, limits)
    soon = max(settings.budget_keep_hours / 24, 1e-9)  # 0 days would be: never
    early = RetentionRules(checkpoints_days=soon, previews_days=soon)
    for which in (RetentionRules.of(settings), early):
        if not over:
            break
        with database.read() as session:
            found = list(retention.find(session, layout, which))
        for one in found:
            wanted = {kind for kind in _kinds(one) if _beyond(over, kind)}
            if stopped() or not wanted:
                continue
            if retention.remove(database, layout, None, one):
                log.info("removed: %s of %s (%d MiB), for the budget of %s", one.kind, one.id, one.bytes >> 20, wanted)
                over = _less(over, one)
        over = _measured(database, layout, limits)
    for still in over:
        log.warning("%s; nothing is started until there is room", still.words())
    return over


def _kinds(one: Removal) -> tuple[budget.Budgeted, ...]:
    """The budgets that its going helps."""
    match one.kind:
        case "checkpoints":
            return ("total", "checkpoints")
        case "preview" | "history":
            return ("total", "runs")
        case "file":
            return ("total", "uploads")


def _beyond(over: tuple[Over, ...], kind: str) -> int:
    return sum(one.used - one.limit for one in over if one.kind == kind)


def _less(over: tuple[Over, ...], one: Removal) -> tuple[Over, ...]:
    """What is left to do once it has gone."""
    helped = _kinds(one)
    reduced = (Over(each.kind, each.used - one.bytes, each.limit) if each.kind in helped else each for each in over)
    return tuple(each for each in reduced if each.used > each.limit)


def _measured(database: Database, layout: Layout, limits: Budget) -> tuple[Over, ...]:
    disk_usage.measure(database, layout)
    return _state(database, limits)


def _state(database: Database, limits: Budget) -> tuple[Over, ...]:
    with database.read() as session:
        return limits.over(budget.measured(session))
