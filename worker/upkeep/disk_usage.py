"""What the data root holds, by kind, and what each owner's files and runs take of it: measured by the leading
housekeeper."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from core.db.engine import Database
from core.jobs.policies import budget, usage
from core.jobs.policies.budget import Kind
from core.spec.run.folder import CHECKPOINTS
from core.storage.layout import Layout


def measure(database: Database, layout: Layout) -> None:
    """Bring `usage.disk_bytes` and `disk_usage` up to date. Models and caches are shared and count for no owner."""
    runs: dict[str, int] = {}
    used: dict[Kind, int] = dict.fromkeys(budget.KINDS, 0)
    for job in _entries(layout.runs):
        if job.is_dir(follow_symlinks=False):
            checkpoints = sum(_size(Path(attempt.path) / CHECKPOINTS) for attempt in _entries(Path(job.path)))
            runs[job.name] = _size(Path(job.path))
            used["checkpoints"] += checkpoints
            used["runs"] += runs[job.name] - checkpoints
    folders: dict[str, Kind] = {
        layout.files.name: "uploads",
        layout.uploads.name: "uploads",
        layout.models.name: "models",
        layout.cache.name: "cache",
    }
    for entry in _entries(layout.root):
        if entry.name != layout.runs.name:
            used[folders.get(entry.name, "other")] += _size_of(entry)
    with database.read() as session:
        owners = usage.owners_of_runs(session, list(runs))
    taken: dict[tuple[str, str], int] = {}
    for job_id, whose in owners.items():
        taken[whose] = taken.get(whose, 0) + runs[job_id]
    with database.write() as session:
        usage.tell_disk(session, taken)
        budget.tell(session, used)


def _size(folder: Path) -> int:
    """Bytes on the disk; a file that vanishes meanwhile counts nothing."""
    return sum(_size_of(entry) for entry in _entries(folder))


def _size_of(entry: os.DirEntry[str]) -> int:
    try:
        if entry.is_dir(follow_symlinks=False):
            return _size(Path(entry.path))
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
