"""What each owner's files and runs take of the data root: measured now and then by the leading housekeeper."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from core.db.engine import Database
from core.jobs import usage
from core.storage.layout import Layout


def measure(database: Database, layout: Layout) -> None:
    """Bring `usage.disk_bytes` up to date. Models and caches are shared and count for nobody."""
    runs = {entry.name: _size(Path(entry.path)) for entry in _entries(layout.runs) if entry.is_dir()}
    with database.read() as session:
        owners = usage.owners_of_runs(session, list(runs))
    taken: dict[tuple[str, str], int] = {}
    for job_id, whose in owners.items():
        taken[whose] = taken.get(whose, 0) + runs[job_id]
    with database.write() as session:
        usage.tell_disk(session, taken)


def _size(folder: Path) -> int:
    """Bytes on the disk; a file that vanishes meanwhile counts nothing."""
    total = 0
    for entry in _entries(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                total += _size(Path(entry.path))
            else:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
