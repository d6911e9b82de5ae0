"""Room on the data root: without it nothing is started, and every waiting job says so."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from core import caches
from core.db.engine import Database
from core.jobs import room
from core.settings import Settings

log = logging.getLogger("eft.worker")


def room_on(settings: Settings) -> int:
    """Bytes that jobs may take of the data root now: what is free, less the reserve (EFT_MIN_FREE_BYTES)."""
    return shutil.disk_usage(settings.root).free - settings.min_free_bytes


class Room:
    def __init__(self, database: Database, root: Path, reserve: int) -> None:
        self._database, self._root, self._reserve = database, root, reserve
        self._told_of_none = False

    def left(self) -> int:
        """As `room_on`; below 0 nothing is started."""
        return shutil.disk_usage(self._root).free - self._reserve

    def tell(self) -> None:
        """Log a change once, and keep the words of waiting jobs up to it. Call it every sweep. What only saves
        time goes before anybody has to wait."""
        if self.left() < 0 and (gone := caches.free(self._root / "cache", -self.left())):
            size = sum(entry.bytes for entry in gone)
            log.warning("removed %d entries of %d MiB from the cache: no room on the data root", len(gone), size >> 20)
        free = self._reserve + self.left()
        with self._database.read() as session:
            stale = room.stale(session, free, self._reserve)
        if stale:
            with self._database.write() as session:
                room.tell(session, free, self._reserve)
        none = free < self._reserve
        if none and not self._told_of_none:
            log.error("%s (EFT_MIN_FREE_BYTES); nothing is started until there is", room.words(free, self._reserve))
        elif self._told_of_none and not none:
            log.warning("there is room on the data root again: %d MiB free", free >> 20)
        self._told_of_none = none
