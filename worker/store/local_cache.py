"""What this box has of a data root that is an object store: copies below EFT_WORK, under the same names.

A copy is complete or not there: it is fetched aside, held against the SHA-256 of its manifest (for an uploaded file: of
the database), and renamed. Copies that no job has used for longest go when there are more than EFT_WORK_BYTES; the
store has them still.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from core import removal
from core.base.files import sync, write_private
from core.errors import NoSpace
from core.spec.run.manifest import MANIFEST, listed_files
from core.spec.run.model_cache import PARTIAL
from core.storage.bucket import Bucket
from core.storage.layout import Layout
from core.storage.store import ObjectChanged

log = logging.getLogger("eft.worker")

FETCHING = "fetching"

Halted = Callable[[], None]
"""Called between two files; raises what shall end the work."""


@dataclass(frozen=True, slots=True)
class _Copy:
    key: str
    bytes: int
    used: float


class LocalCache:
    """Any number of threads may use it; one process has the folder."""

    def __init__(self, bucket: Bucket, layout: Layout, most: int, reserve: int) -> None:
        """`most`: bytes of copies (0: no bound); `reserve`: bytes that stay free on the disk."""
        self.bucket = bucket
        self.layout = layout
        self._most, self._reserve = most, reserve
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._fetching: dict[str, threading.Lock] = {}
        shutil.rmtree(layout.root / FETCHING, ignore_errors=True)  # of a worker that was killed

    # -- in use

    def hold(self, key: str) -> None:
        """Neither it nor anything below it goes until `release`."""
        with self._lock:
            self._held[key] += 1

    def release(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._held.subtract(keys)
            self._held = +self._held

    def _in_use(self, key: str) -> bool:
        return any(key == held or key.startswith(f"{held}/") or held.startswith(f"{key}/") for held in self._held)

    # -- fetch

    def folder(self, key: str, halted: Halted) -> bool:
        """A folder with a manifest (a model, a data set, a checkpoint) is here, complete. False: the store has none, or
        one that is damaged. Raises StoreAway, NoSpace."""
        if self._whole(key):
            return True
        with self._alone(key):
            if self._whole(key):
                return True
            try:
                manifest = self.bucket.read(f"{key}/{MANIFEST}")
                files = listed_files(manifest)
            except FileNotFoundError:
                return False
            except (ValueError, KeyError, TypeError) as error:
                self._damaged(key, f"its manifest cannot be read ({error})")
                return False
            self.make_room(sum(size for _, size, _ in files))
            with self._aside() as aside:
                for name, size, sha256 in files:
                    halted()
                    path = aside / name
                    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    try:
                        self._fetch(f"{key}/{name}", path, size, sha256)
                    except (FileNotFoundError, ObjectChanged) as error:
                        self._damaged(key, str(error))
                        return False
                write_private(aside / MANIFEST, manifest)
                self._appear(aside, key)
            return True

    def file(self, key: str, size: int, sha256: str) -> bool:
        """An uploaded file is here. False: the store has none like it. Raises StoreAway, NoSpace."""
        path = self.layout.root / key
        with self._alone(key):
            if path.is_file() and path.stat().st_size == size:
                os.utime(path)
                return True
            self.make_room(size)
            with self._aside() as aside:
                try:
                    self._fetch(key, aside / "file", size, sha256)
                except FileNotFoundError:
                    return False
                except ObjectChanged as error:
                    log.error("%s in %s is damaged: it is not what was uploaded (%s)", key, self.bucket.where, error)
                    return False
                self._appear(aside / "file", key)
            return True

    def small(self, prefix: str) -> None:
        """Small files that say where the others are: those that the store has newer than this box, or that it lacks."""
        for entry in self.bucket.tree(prefix):
            path = self.layout.root / entry.key
            if not path.exists() or path.stat().st_mtime < entry.modified:
                with suppress(FileNotFoundError):
                    write_private(path, self.bucket.read(entry.key))
                    os.utime(path, (entry.modified, entry.modified))

    def _whole(self, key: str) -> bool:
        folder = self.layout.root / key
        try:
            files = listed_files((folder / MANIFEST).read_bytes())
            if any((folder / name).stat().st_size != size for name, size, _ in files):
                return False
            os.utime(folder / MANIFEST)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _fetch(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Once more where it is not what was stored: it may have been damaged on its way here, and what is damaged in
        the store is lost to every box. Raises FileNotFoundError, ObjectChanged, StoreAway."""
        for again in (True, False):
            try:
                if self.bucket.get_file(key, path, size) == sha256:
                    return
                raise ObjectChanged(f"{key} has another SHA-256")
            except ObjectChanged as error:
                path.unlink(missing_ok=True)
                if not again:
                    raise
                log.warning("%s: %s; fetched once more", self.bucket.where, error)

    def _damaged(self, key: str, why: str) -> None:
        log.error("%s in %s is damaged and is not used: %s", key, self.bucket.where, why)
        self.bucket.delete(f"{key}/{MANIFEST}")  # so that it is made again

    @contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        with self._lock:
            lock = self._fetching.setdefault(key, threading.Lock())
        with lock:
            yield

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        aside = self.layout.root / FETCHING / uuid.uuid4().hex
        aside.mkdir(mode=0o700, parents=True)
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def _appear(self, aside: Path, key: str) -> None:
        final = self.layout.root / key
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if final.is_dir():  # it lacked something
            shutil.rmtree(final)
        if aside.is_dir():
            sync(aside)
        aside.replace(final)
        sync(final.parent)

    # -- room

    def make_room(self, needed: int = 0) -> list[str]:
        """Let copies go until so many more bytes have room; their keys. Raises NoSpace where that is not enough."""
        gone = []
        with self._lock:
            found = sorted(self._found(), key=lambda copy: copy.used)
            total = sum(copy.bytes for copy in found)
            for copy in found:
                over = self._most and total + needed > self._most
                if not over and self._free() >= needed:
                    break
                if not self._in_use(copy.key):
                    removal.remove(self.layout.root / copy.key, ".old-", ignore_errors=True)
                    total -= copy.bytes
                    gone.append(copy.key)
        if gone:
            log.info("removed %d copies from %s (EFT_WORK_BYTES); the data root has them", len(gone), self.layout.root)
        if needed and self._free() < needed:
            raise NoSpace(
                f"{self.layout.root} (EFT_WORK) has {max(0, self._free()) >> 20} MiB beside its reserve, and "
                f"{needed >> 20} MiB of the data root are needed there",
                needs_bytes=needed,
            )
        return gone

    def _free(self) -> int:
        return shutil.disk_usage(self.layout.root).free - self._reserve

    def _found(self) -> Iterator[_Copy]:
        root = self.layout.root
        for path in self.layout.files.glob("file-*"):
            with suppress(FileNotFoundError):
                yield _Copy(f"files/{path.name}", path.stat().st_size, path.stat().st_mtime)
        for manifest in self.layout.models.glob(f"*/**/{MANIFEST}"):
            if PARTIAL not in manifest.parts:
                yield _folder(root, manifest.parent, manifest)
        for run in self.layout.runs.glob("*/attempt-*"):
            yield _folder(root, run, run)


def _folder(root: Path, folder: Path, newest: Path) -> _Copy:
    size = 0
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):
                size += path.lstat().st_size
    used = time.time()
    with suppress(FileNotFoundError):
        used = newest.stat().st_mtime
    return _Copy(str(folder.relative_to(root)), size, used)
