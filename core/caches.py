"""The cache below a data root (packed weights, tokenised rows, compiled blocks): who uses an entry, and what goes.

An entry is a folder that is complete or not there, with a manifest in it. A reader holds a shared lock on its
manifest and touches it; what has not been used for longest goes first when room is needed, and nothing that is held.
Any number of processes may do both at once: the lock is the kernel's and dies with its process, and a folder is renamed
before it is emptied, so that no reader finds half of one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core import removal
from core.spec.run.manifest import MANIFEST

ENTRIES = (f"packed/[!.]*/{MANIFEST}", "tokens/[!.]*/[!.]*/about.json", f"compiled/[!.]*/{MANIFEST}")
"""Manifests of packed weights, of tokenised rows and of compiled blocks."""
STALE_SECONDS = 86400.0
"""Age after which a half-written or half-removed entry has no owner: its process was killed."""


class Lease:
    """Keeps an entry from being thrown away until it is closed, or nothing refers to it any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def hold(manifest: Path) -> Lease | None:
    """Use the entry of this manifest from now on; None when there is none (any more). OSError where files cannot be
    locked."""
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    lease = Lease(descriptor)
    if not _locked(descriptor, manifest, fcntl.LOCK_SH):
        lease.close()
        return None
    with suppress(PermissionError):  # somebody else's cache, which that one keeps in order
        os.utime(descriptor)
    return lease


@dataclass(frozen=True, slots=True)
class CacheEntry:
    manifest: Path
    bytes: int
    used: float
    """When it was last made or held."""


def entries(cache: Path) -> list[CacheEntry]:
    """All of them, the one not used for longest first."""
    found = []
    for pattern in ENTRIES:
        for manifest in cache.glob(pattern):
            try:
                sizes = [path.stat().st_size for path in manifest.parent.rglob("*")]
                found.append(CacheEntry(manifest, sum(sizes), manifest.stat().st_mtime))
            except FileNotFoundError:
                continue  # just thrown away by somebody else
    return sorted(found, key=lambda entry: entry.used)


def make_room(cache: Path, most: int) -> list[CacheEntry]:
    """Throw entries away until the others take at most so many bytes; which ones went. More stays where it is held."""
    _sweep(cache)
    found = entries(cache)
    total, gone = sum(entry.bytes for entry in found), []
    for entry in found:
        if total <= most:
            break
        if _removed(entry.manifest):
            total -= entry.bytes
            gone.append(entry)
    return gone


def free(cache: Path, wanted: int) -> list[CacheEntry]:
    """Remove at least the given number of bytes, as far as entries without a lock suffice."""
    return make_room(cache, max(0, sum(entry.bytes for entry in entries(cache)) - wanted))


def _removed(manifest: Path) -> bool:
    folder = manifest.parent
    try:
        descriptor = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _locked(descriptor, manifest, fcntl.LOCK_EX):
            return False
        removal.remove(folder, ".old-", ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    if folder.parent.parent.name == "tokens":
        with suppress(OSError):
            folder.parent.rmdir()  # the rows' own folder, once no rendering of them is left
    return True


def _locked(descriptor: int, manifest: Path, how: int) -> bool:
    """Locked without waiting, and still the file of that name."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_ino == manifest.stat().st_ino
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        return False


def _sweep(cache: Path) -> None:
    for pattern in ("packed/.*-*", "tokens/.*-*", "tokens/*/.*-*", "compiled/.*-*"):
        for left in cache.glob(pattern):
            try:
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
            except FileNotFoundError:
                continue
