"""Making a backup while jobs run: the database first, then everything of the data root that it names.

Why in that order, and once, is enough. A row is written when its bytes are there, so what the database names at that
moment is on the disk. Uploads, artifacts and checkpoints never change once they have their name. A checkpoint may be
pruned while it is read, when a newer one is there: then the attempt is looked at again. Events and logs only grow, and
are read after the checkpoints: they reach at least as far as the checkpoint a restored job goes on from, and what the
database had not heard of them yet, the next attempt tells it, as after the death of a worker. To a job a restore is
what a power cut is.

What is newer than the database (an attempt begun since, a file uploaded since) is left out: nothing names it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from box.backup import database as databases
from box.backup.database import Dump
from box.backup.store import ASIDE, DATABASE, FILES, BackupError, Changed, Kept, Snapshot, Store, sha256_of
from core import __version__
from core.db import migrate
from core.db.engine import Database
from core.spec.run import ARTIFACTS, CHECKPOINTS, UNFINISHED
from core.storage.layout import Layout

TRIES = 3
"""Of reading a folder whose files are pruned meanwhile, and of a whole backup whose files were deleted meanwhile."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


@dataclass(slots=True)
class Options:
    models: bool = True
    link: bool = False
    """Hard links where data root and backups are on one file system: takes no room, and no help when that disk dies."""
    checksum: bool = False
    """Read every file again, also those whose size, time and inode are what they were."""


def create(database: Database, layout: Layout, store: Store, options: Options) -> Snapshot:
    """A new snapshot, complete. Raises BackupError; then there is none, and the next one finds what was brought."""
    standing = migrate.current(database)
    if standing != migrate.head():
        raise BackupError(
            f"the database has schema {standing or 'none'}, this version {migrate.head()}: `eft db status`"
        )
    store.create()
    with store.writing():
        return _Work(database, layout, store, options).run()


class _Work:
    def __init__(self, database: Database, layout: Layout, store: Store, options: Options) -> None:
        self.database, self.layout, self.store, self.options = database, layout, store, options
        names = store.names()
        self._before = {} if not names else {kept.path: kept for kept in store.kept(store.read(names[-1]))}
        self._brought = self._bytes = self._files = 0

    def run(self) -> Snapshot:
        for again in reversed(range(TRIES)):
            name = time.strftime("%Y-%m-%dT%H%M%SZ-", time.gmtime()) + "".join(
                secrets.choice(_ALPHABET) for _ in "1234"
            )
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
            for path in _folders(folder / CHECKPOINTS):
                self._whole(out, path)
            for path in _files(folder):
                inside = path.relative_to(folder)
                if inside.parts[0] == CHECKPOINTS or path in promised:
                    continue
                # Of an attempt that runs, artifacts are being written: nothing has been promised of them yet.
                self._optional(out, path, grows=inside.parts[0] != ARTIFACTS)
        return missing

    def _whole(self, out: IO[str], folder: Path) -> None:
        """A checkpoint with all its files, or none of it: it may be pruned meanwhile."""
        for _ in range(TRIES):
            lines = []
            try:
                for path in _files(folder):
                    lines.append(self._bring(path, grows=False))
                if folder.is_dir():
                    for kept in lines:
                        self._write(out, kept)
                return
            except Changed:
                if not folder.is_dir():
                    return

    def _models(self, out: IO[str]) -> None:
        """What is complete: work in progress has names with a dot (core/train/model_cache.py)."""
        for top in _folders(self.layout.models):
            if top.name.startswith("."):
                continue
            for path in _files(top):
                self._optional(out, path, grows=False)

    def _named(self, out: IO[str], path: Path, sha256: str) -> list[str]:
        try:
            kept = self._bring(path, grows=False)
        except Changed as error:
            return [f"{self._name(path)}: {error}"]
        self._write(out, kept)
        if kept.sha256 != sha256:
            return [f"{kept.path}: its SHA-256 is not the one that was stored"]
        return []

    def _optional(self, out: IO[str], path: Path, *, grows: bool) -> None:
        try:
            self._write(out, self._bring(path, grows=grows))
        except Changed:
            return  # gone, or still being written: nothing names it

    def _still_missing(self, missing: Iterable[str]) -> bool:
        """Whether a newer state of the database may not name them: not where the content itself is wrong."""
        return any("SHA-256" not in line for line in missing)

    # -- one file

    def _name(self, path: Path) -> str:
        return path.relative_to(self.layout.root).as_posix()

    def _bring(self, path: Path, *, grows: bool) -> Kept:
        name = self._name(path)
        before = self._before.get(name)
        if before is not None and not self.options.checksum:
            try:
                seen = path.lstat()
            except OSError as error:
                raise Changed(f"{error.strerror}") from error
            same = (seen.st_size, seen.st_mtime_ns, seen.st_ino) == before.mark
            if same and self.store.has(before.sha256, before.bytes):
                return before
        kept, took = self.store.bring(path, name, grows=grows, link=self.options.link)
        self._brought += took
        return kept

    def _write(self, out: IO[str], kept: Kept) -> None:
        line: dict[str, Any] = {name: getattr(kept, name) for name in Kept.__slots__}
        out.write(json.dumps(line) + "\n")
        self._files += 1
        self._bytes += kept.bytes

    # -- the end

    def _finish(self, name: str, aside: Path, said: Dump, missing: list[str]) -> Snapshot:
        sums = {}
        for path in sorted(path for path in aside.rglob("*") if path.is_file()):
            path.chmod(0o600)
            _sync(path)
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
            sums=sums,
            missing=missing,
        )
        self.store.finish(aside, snapshot)
        return snapshot


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
