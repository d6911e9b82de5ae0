"""The bound on what can be made again (packed weights, tokenised rows): what nobody has used for longest goes first."""

from __future__ import annotations

import shutil
import time
import uuid
from pathlib import Path

KINDS = ("packed", "tokens")
"""Folders of entries below the cache; an entry is a folder whose mtime is its last use (`core.train.files.used`)."""
JUST_USED_SECONDS = 3600.0
"""An entry that was used since may still be being read: it stays, whatever the bound says."""


def shrink(cache: Path, limit: int, *, just_used: float = JUST_USED_SECONDS) -> list[str]:
    """Delete entries until those that stay take at most `limit` bytes. Returns what went, as `kind/name`. Readers that
    have an entry open keep what they have; for all others it is gone at once, by a rename."""
    entries = []
    for kind in KINDS:
        for folder in (cache / kind).glob("[!.]*"):
            try:
                if folder.is_dir():
                    entries.append((folder.stat().st_mtime, _size(folder), folder))
            except FileNotFoundError:
                continue  # thrown away meanwhile
    total, gone = sum(size for _, size, _ in entries), []
    for used, size, folder in sorted(entries, key=lambda entry: entry[0]):
        if total <= limit or time.time() - used < just_used:
            break
        aside = folder.with_name(f".old-{folder.name}-{uuid.uuid4().hex}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            continue
        shutil.rmtree(aside)
        total -= size
        gone.append(f"{folder.parent.name}/{folder.name}")
    return gone


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
