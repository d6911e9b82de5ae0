"""Room on the data root: without it nothing is started, and every waiting job says so."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from core.db.engine import Database
from core.jobs import room

log = logging.getLogger("eft.worker")


class Room:
    def __init__(self, database: Database, root: Path, needed: int) -> None:
        self._database, self._root, self._needed = database, root, needed
        self._told: bool | None = None
        """What was said last; None: nothing yet, and an earlier worker may have said that there is none."""

    def enough(self) -> bool:
        return self._free() >= self._needed

    def tell(self) -> None:
        """Log a change once, and keep the words of waiting jobs up to it. Call it every sweep."""
        free = self._free()
        enough = free >= self._needed
        if not enough:
            with self._database.write() as session:
                room.missing(session, free, self._needed)
            if self._told is not False:
                log.error("%s (EFT_MIN_FREE_BYTES); nothing is started until there is", room.words(free, self._needed))
        elif self._told is not True:
            with self._database.write() as session:
                room.back(session)
            if self._told is False:
                log.warning("there is room on the data root again: %d MiB free", free >> 20)
        self._told = enough

    def _free(self) -> int:
        return shutil.disk_usage(self._root).free
