"""Making a backup while jobs run: the database first, then everything of the data root that it names.

Why in that order, and once, is enough. A row is written when its bytes are there, so what the database names at that
moment is on the disk. Uploads, artifacts and checkpoints never change once they have their name. A checkpoint may be
pruned meanwhile, when a newer one is there: it is opened as a whole first, or looked for again. Events and logs only
grow, and are read after the checkpoints: they reach at least as far as the checkpoint a restored job goes on from, and
what the database had not heard of them yet, the next attempt tells it, as after the death of a worker. To a job a
restore is what a power cut is.

What is newer than the database (an attempt begun since, a file uploaded since) is left out: nothing names it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from box.backup import database as databases
from box.backup.database import Dump
from box.backup.store import (
    ASIDE,
    DATABASE,
    FILES,
    BackupError,
    BackupStore,
    FileChanged,
    KeptFile,
    Snapshot,
    opened,
    sha256_of,
)
from core import __version__
from core.base.files import sync
from core.db import migrate
from core.db.engine import Database
from core.spec.run.folder import ARTIFACTS, CHECKPOINTS, UNFINISHED
from core.spec.run.manifest import MANIFEST
from core.storage.layout import Layout

log = logging.getLogger("eft.backup")

TRIES = 3
"""Attempts at a whole backup whose files were deleted meanwhile."""
MOST_LOOKS = 1000
"""Readings of a folder of checkpoints that are pruned meanwhile."""
EMPTY_LOOKS = 4
"""After which a folder is taken to have no checkpoint: a listing may miss one that comes while another goes."""
EMPTY_PAUSE = 0.01
"""Seconds between them."""


@dataclass(slots=True)
class Options:
    models: bool = True
    bucket: str | None = None
    """The data root is this object store: the database alone is kept."""
    link: bool = False
    """Hard links where data root and backups are on one file system: takes no room, and no help when that disk dies."""
    checksum: bool = False
    """Read every file again, also those whose size, time and inode are what they were, and what is kept of them."""


def create(database: Database, layout: Layout, store: BackupStore, options: Options) -> Snapshot:
    """A new snapshot, complete. Raises BackupError; then there is none, and the next one finds what was brought."""
    standing = migrate.current(database)
    if standing is None:
        raise BackupError("there is no installation in the database; EFT_DATA and EFT_DATABASE_URL name where it is")
    if standing != migrate.head():
        raise BackupError(f"the database has schema {standing}, this version {migrate.head()}: `eft db status`")
    store.create()
    with store.writing():
        return _Work(database, layout, store, options).run()


class _Work:
    def __init__(self, database: Database, layout: Layout, store: BackupStore, options: Options) -> None:
        self.database, self.layout, self.store, self.options = database, layout, store, options
        self._before = self._newest()
        self._brought = self._bytes = self._files = 0

    def _newest(self) -> dict[str, KeptFile]:
        """What the last one kept. Where that is damaged, every file is read again."""
        names = self.store.names()
        try:
            return {} if not names else {kept.path: kept for kept in self.store.kept(self.store.read(names[-1]))}
        except BackupError as error:
            log.warning("%s; all files are read again", error.message)
            return {}

    def run(self) -> Snapshot:
        for again in reversed(range(TRIES)):
            name = self.store.next_name()
            aside = self.store.snapshots / f"{ASIDE}{name}"
            aside.mkdir(mode=0o700)
            said = databases.dump(self.database, aside / DATABASE)
            missing = self._collect(said, aside)
            # Somebody may have deleted a file since: then a newer state of the database does not name it any more.
            if missing and again and self._still_missing(missing):
                for path in sorted(aside.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                aside.rmdir()
                continue
            return self._finish(name, aside, said, missing)
        raise AssertionError("the last try returns")

    def _collect(self, said: Dump, aside: Path) -> list[str]:
        """Bring everything and write the list of it. Returns what the database names and is not there."""
        self._bytes = self._files = 0
        missing: list[str] = []
        with (aside / FILES).open("w", encoding="utf-8") as out:
            os.fchmod(out.fileno(), 0o600)
            if self.options.bucket is not None:
                return []
            for file_id, sha256 in sorted(said.files.items()):
                missing += self._named(out, self.layout.file(file_id), sha256)
            listed: dict[str, list[tuple[int, str, str]]] = {}
            for (job_id, attempt, path), sha256 in said.artifacts.items():
                listed.setdefault(job_id, []).append((attempt, path, sha256))
            for job_id, newest in sorted(said.attempts.items()):
                missing += self._job(out, job_id, newest, listed.get(job_id, ()))
            if self.options.models:
                self._models(out)
            out.flush()
            os.fsync(out.fileno())
        return missing

    # -- what there is

    def _job(self, out: IO[str], job_id: str, newest: int, listed: Iterable[tuple[int, str, str]]) -> list[str]:
        missing, promised = [], set()
        for attempt, name, sha256 in sorted(listed):
            artifact = self.layout.artifacts(job_id, attempt) / name
            promised.add(artifact)
            missing += self._named(out, artifact, sha256)
        for number in range(1, newest + 1):
            folder = self.layout.attempt(job_id, number)
            self._checkpoints(out, folder / CHECKPOINTS)
            for path in _files(folder):
                inside = path.relative_to(folder)
                if inside.parts[0] == CHECKPOINTS or path in promised:
                    continue
                # Of an attempt that runs, artifacts are being written: nothing has been promised of them yet.
                self._optional(out, path, grows=inside.parts[0] != ARTIFACTS)
        return missing

    def _checkpoints(self, out: IO[str], folder: Path) -> None:
        """All that stand there, each whole or not at all; while there is any, at least one: when those that were there
        are pruned before they could be read, newer ones have come."""
        empty = 0
        for _ in range(MOST_LOOKS):
            there = list(_folders(folder))
            taken = [self._whole(out, path) for path in reversed(there)]
            empty = 0 if there else empty + 1
            if any(taken) or empty == EMPTY_LOOKS or not folder.is_dir():
                return
            if not there:
                time.sleep(EMPTY_PAUSE)
        raise BackupError(f"{folder}: its checkpoints come and go faster than they can be read; try again")

    def _whole(self, out: IO[str], folder: Path) -> bool:
        """False: it is not there any more. Its files are opened first: what is open can be read when it is pruned."""
        with ExitStack() as stack:
            try:
                files = {path: stack.enter_context(opened(path)) for path in _files(folder)}
            except FileChanged:
                return False
            if not _complete(folder, files):
                return False
            for path, file in files.items():
                self._write(out, self._keep(file, path, grows=False))
        return True

    def _models(self, out: IO[str]) -> None:
        """What is complete: work in progress has names with a dot (core/train/hub/model_cache.py)."""
        for top in _folders(self.layout.models):
            if top.name.startswith("."):
                continue
            for path in _files(top):
                self._optional(out, path, grows=False)

    def _named(self, out: IO[str], path: Path, sha256: str) -> list[str]:
        try:
            kept = self._bring(path, grows=False)
        except FileChanged as error:
            return [f"{self._name(path)}: {error}"]
        self._write(out, kept)
        if kept.sha256 != sha256:
            return [f"{kept.path}: its SHA-256 is not the one that was stored"]
        return []

    def _optional(self, out: IO[str], path: Path, *, grows: bool) -> None:
        try:
            self._write(out, self._bring(path, grows=grows))
        except FileChanged:
            return  # gone, or still being written: nothing names it

    def _still_missing(self, missing: Iterable[str]) -> bool:
        """Whether a newer state of the database may not name them: not where the content itself is wrong."""
        return any("SHA-256" not in line for line in missing)

    # -- one file

    def _name(self, path: Path) -> str:
        return path.relative_to(self.layout.root).as_posix()

    def _bring(self, path: Path, *, grows: bool) -> KeptFile:
        with opened(path) as file:
            return self._keep(file, path, grows=grows)

    def _keep(self, file: IO[bytes], path: Path, *, grows: bool) -> KeptFile:
        name = self._name(path)
        before = self._before.get(name)
        if before is not None and not self.options.checksum:
            seen = os.fstat(file.fileno())
            same = (seen.st_size, seen.st_mtime_ns, seen.st_ino) == before.mark
            if same and self.store.has(before.sha256, before.bytes):
                return before
        kept, took = self.store.bring(
            file, path, name, grows=grows, link=self.options.link, doubt=self.options.checksum
        )
        self._brought += took
        return kept

    def _write(self, out: IO[str], kept: KeptFile) -> None:
        line: dict[str, Any] = {name: getattr(kept, name) for name in KeptFile.__slots__}
        out.write(json.dumps(line) + "\n")
        self._files += 1
        self._bytes += kept.bytes

    # -- the end

    def _finish(self, name: str, aside: Path, said: Dump, missing: list[str]) -> Snapshot:
        sums = {}
        for path in sorted(path for path in aside.rglob("*") if path.is_file()):
            path.chmod(0o600)
            sync(path)
            found = sha256_of(path)
            assert found is not None
            sums[path.relative_to(aside).as_posix()] = found
        snapshot = Snapshot(
            name=name,
            version=__version__,
            revision=said.revision,
            database="sqlite" if self.database.is_sqlite else "postgresql",
            taken_at=said.taken_at,
            files=self._files,
            bytes=self._bytes,
            brought=self._brought,
            models=self.options.models,
            bucket=self.options.bucket,
            sums=sums,
            missing=missing,
        )
        self.store.finish(aside, snapshot)
        return snapshot


def _complete(folder: Path, files: Mapping[Path, IO[bytes]]) -> bool:
    """Whether these are all files of a checkpoint, by its manifest (core/train/checkpoint/store.py): it may have lost
    some before they were listed. One without a manifest is taken as it is while it stands."""
    manifest = files.get(folder / MANIFEST)
    if manifest is None:
        return bool(files) and folder.is_dir()
    try:
        names = set(json.load(manifest)["files"])
    except (ValueError, KeyError, TypeError):
        names = {path.name for path in files} - {MANIFEST}  # damaged: kept as it is, and told when it is read
    manifest.seek(0)
    return names <= {path.name for path in files}


def _folders(folder: Path) -> Iterator[Path]:
    """Complete ones: names with a dot or `tmp-` are of work in progress."""
    yield from _sorted(folder, lambda path: path.is_dir() and not path.is_symlink())


def _files(folder: Path) -> Iterator[Path]:
    """All plain files below, what only grows after the folders: see the module."""
    for inner in _sorted(folder, lambda path: path.is_dir() and not path.is_symlink()):
        yield from _files(inner)
    yield from _sorted(folder, lambda path: path.is_file() and not path.is_symlink())


def _sorted(folder: Path, wanted: Callable[[Path], bool]) -> list[Path]:
    try:
        found = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in found if not path.name.startswith((UNFINISHED, ".gone-")) and wanted(path)]
