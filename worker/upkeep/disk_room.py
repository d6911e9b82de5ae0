"""Room on the data root: without it nothing is started, and every waiting job says so."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from core import caches
from core.db.engine import Database
from core.jobs.policies import budget, disk_room
from core.jobs.policies.budget import NO_BUDGET, Budget
from core.settings import Settings

log = logging.getLogger("eft.worker")


def room_on(settings: Settings, database: Database) -> int:
    """Bytes that jobs may take of the data root now: what is free, less the reserve (EFT_MIN_FREE_BYTES), and what is
    left of the budgets (EFT_DISK_BUDGET_…)."""
    free = shutil.disk_usage(settings.root).free
    with database.read() as session:
        return budget.room(session, Budget.of(settings), free, settings.min_free_bytes).left


class Room:
    """`left` is asked before every claim; budgets are as of the last `tell`."""

    def __init__(self, database: Database, root: Path, reserve: int, limits: Budget = NO_BUDGET) -> None:
        self._database, self._root, self._reserve, self._limits = database, root, reserve, limits
        self._budget: int | None = None
        self._told = ""

    def left(self) -> int:
        """As `room_on`; below 0 nothing is started."""
        return budget.Headroom(shutil.disk_usage(self._root).free, self._reserve, self._budget).left

    def tell(self) -> None:
        """Log a change once, and keep the words of waiting jobs up to it. Call it every sweep. What only saves
        time goes before anybody has to wait."""
        wanting = self._reserve - shutil.disk_usage(self._root).free
        if wanting > 0 and (gone := caches.free(self._root / "cache", wanting)):
            size = sum(entry.bytes for entry in gone)
            log.warning("removed %d entries of %d MiB from the cache: no room on the data root", len(gone), size >> 20)
        with self._database.read() as session:
            free = shutil.disk_usage(self._root).free
            here = budget.room(session, self._limits, free, self._reserve)
            self._budget = here.budget
            state = (self._reserve + here.left, self._reserve, here.over)
            stale = disk_room.stale(session, *state)
        if stale:
            with self._database.write() as session:
                disk_room.tell(session, *state)
        if here.left < 0 and not self._told:
            self._told = disk_room.words(*state[:2], over=here.over)
            log.error("%s; nothing is started until there is", self._told)
        elif self._told and here.left >= 0:
            log.warning("there is room on the data root again: %d MiB free", free >> 20)
            self._told = ""
