"""A folder of backups: content by its SHA-256, once, and a snapshot that names it.

    eft-backup.json                     which format this is
    objects/ab/abcdef…                  one file's content, named by its SHA-256
    snapshots/2026-11-21T190211.042Z/   complete or not there: it is renamed into place when everything it names is
      database/…                        what the database said (box/backup/database.py)
      files.jsonl                       one line a file of the data root: path, bytes, sha256, mode, mtime_ns, inode
      snapshot.json                     versions, times, sums, and the SHA-256 of all the others here
    .lock                               one writer at a time

An object never changes once it has its name, so a backup that breaks off costs nothing but the objects it has brought,
and the next one finds them there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

from core import removal
from core.base.files import sync, write_private
from core.errors import EftError
from core.logfile import first_byte

FORMAT = 1
MARK = "eft-backup.json"
SNAPSHOT = "snapshot.json"
FILES = "files.jsonl"
DATABASE = "database"
ASIDE = ".tmp-"
BLOCK = 1 << 20
_TIME = "%Y-%m-%dT%H%M%S.%fZ"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"\d{4}-\d\d-\d\dT\d{6}\.\d{3}Z")


class BackupError(EftError):
    """The backup cannot be made, read or restored; the message says why and what to do."""

    code = "backup"


class FileChanged(Exception):
    """A file was not the same at the end of reading it as at the beginning, or is gone."""


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One file of the data root as a snapshot has it."""

    path: str
    """Below the data root, with slashes."""
    bytes: int
    sha256: str
    mode: int
    mtime_ns: int
    inode: int

    @property
    def mark(self) -> tuple[int, int, int]:
        """Same mark, same content: what rsync goes by, and the inode."""
        return self.bytes, self.mtime_ns, self.inode


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`snapshot.json`: what was kept, of which installation, and when."""

    name: str
    version: str
    """Version of eft that made it."""
    revision: str
    """Revision of the database's schema."""
    database: str
    """sqlite or postgresql."""
    taken_at: float
    """By the database's clock: the moment that a restore goes back to."""
    files: int
    bytes: int
    brought: int
    """Bytes that no earlier backup had."""
    models: bool
    """Whether models were kept; if not they are fetched again."""
    bucket: str | None
    """The object store that is the data root, and keeps its own content; None: the data root is a folder."""
    sums: dict[str, str]
    """SHA-256 of the other files of the snapshot."""
    missing: list[str] = field(default_factory=list)
    """What the database names and the data root did not have, or not as it was stored."""
    format: int = FORMAT


class BackupStore:
    """Raises BackupError where the folder is something else, or another backup is being made in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.objects = self.root / "objects"
        self.snapshots = self.root / "snapshots"

    def create(self) -> None:
        """Make the folder, for this user alone; one that is there and no folder of backups is refused."""
        if (self.root / MARK).exists():
            self.check()
            return
        if self.root.exists() and (not self.root.is_dir() or any(not self._begun(one) for one in self.root.iterdir())):
            raise BackupError(f"{self.root} is not empty and no folder of backups: name a new one")
        for folder in (self.root, self.objects, self.snapshots):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.root / MARK, json.dumps({"format": FORMAT}).encode())

    def _begun(self, path: Path) -> bool:
        """Whether it is from a first backup that was killed before the folder had its mark."""
        empty = path in (self.objects, self.snapshots) and not any(path.iterdir())
        return empty or path.name.startswith(f".{MARK}.")

    def check(self) -> None:
        try:
            told = json.loads((self.root / MARK).read_bytes())
        except (OSError, ValueError) as error:
            why = f"it has no {MARK}" if isinstance(error, FileNotFoundError) else f"{MARK}: {error}"
            raise BackupError(f"{self.root} is not a backup folder: {why}") from error
        if told.get("format") != FORMAT:
            raise BackupError(f"{self.root} has format {told.get('format')}; this version reads {FORMAT}")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Be the only one to write. What an earlier writer left half done goes."""
        descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BackupError(f"another backup is being made in {self.root}; wait for its end") from None
            for left in [*self.objects.glob(f"{ASIDE}*"), *self.snapshots.glob(f"{ASIDE}*")]:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield
        finally:
            os.close(descriptor)

    # -- objects

    def object(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise BackupError(f"not a SHA-256: {sha256[:80]!r}")
        return self.objects / sha256[:2] / sha256

    def has(self, sha256: str, size: int) -> bool:
        try:
            return self.object(sha256).stat().st_size == size
        except FileNotFoundError:
            return False

    def _sound(self, sha256: str, size: int, doubt: bool) -> bool:
        return self.has(sha256, size) and not (doubt and sha256_of(self.object(sha256)) != sha256)

    def bring(
        self, file: IO[bytes], source: Path, name: str, *, grows: bool, link: bool, doubt: bool = False
    ) -> tuple[KeptFile, int]:
        """Keep the content of an open file, that of `source`, under `name`; with how many bytes that took. `grows`: a
        log, of which what is there now is kept. `doubt`: what is here already is read, too, and replaced where it is
        damaged. Raises FileChanged for any other file that changed while it was read."""
        before = os.fstat(file.fileno())
        start = first_byte(file.fileno(), before.st_size) if grows else 0
        size = before.st_size - start
        # A link would go on changing with a file that grows.
        sha256, took = (
            self._linked(file, source, size, doubt) if link and not grows else self._copied(file, start, size, doubt)
        )
        after = os.fstat(file.fileno())
        if not grows and (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise FileChanged(f"{name}: changed while it was read")
        mode = stat.S_IMODE(before.st_mode)
        return KeptFile(name, size, sha256, mode, before.st_mtime_ns, before.st_ino), took

    def _copied(self, file: IO[bytes], start: int, size: int, doubt: bool) -> tuple[str, int]:
        aside = self.objects / f"{ASIDE}{os.getpid()}"
        digest = hashlib.sha256()
        file.seek(start)
        left = size
        with aside.open("wb") as copy:
            os.fchmod(copy.fileno(), 0o600)
            while left:
                block = file.read(min(BLOCK, left))
                if not block:
                    raise FileChanged("it became shorter while it was read")
                digest.update(block)
                copy.write(block)
                left -= len(block)
            sha256 = digest.hexdigest()
            if self._sound(sha256, size, doubt):
                aside.unlink()
                return sha256, 0
            copy.flush()
            os.fsync(copy.fileno())
        return sha256, self._place(aside, sha256, size)

    def _linked(self, file: IO[bytes], source: Path, size: int, doubt: bool) -> tuple[str, int]:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        if self._sound(sha256, size, doubt):
            return sha256, 0
        aside = self.objects / f"{ASIDE}{os.getpid()}"
        try:
            os.link(source, aside, follow_symlinks=False)
        except OSError:  # another file system, or one without links
            return self._copied(file, 0, size, doubt)
        if aside.stat().st_ino != os.fstat(file.fileno()).st_ino:
            aside.unlink()
            raise FileChanged("another file took its name while it was read")
        self._place(aside, sha256, size)
        return sha256, 0

    def _place(self, aside: Path, sha256: str, size: int) -> int:
        target = self.object(sha256)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        aside.replace(target)
        sync(target.parent)
        return size

    # -- snapshots

    def names(self) -> list[str]:
        """Names of the complete snapshots, oldest first."""
        if not self.snapshots.is_dir():
            return []
        return sorted(path.name for path in self.snapshots.iterdir() if _NAME.fullmatch(path.name))

    def next_name(self) -> str:
        """After all others, also when the clock was set back."""
        now = datetime.now(UTC)
        if names := self.names():
            now = max(now, datetime.strptime(names[-1], _TIME).replace(tzinfo=UTC) + timedelta(milliseconds=1))
        return f"{now:%Y-%m-%dT%H%M%S}.{now.microsecond // 1000:03d}Z"

    def read(self, name: str | None = None) -> Snapshot:
        """A snapshot, by default the newest. Raises BackupError."""
        names = self.names()
        if not names:
            raise BackupError(f"there is no complete backup in {self.root}")
        if name is not None and name not in names:
            raise BackupError(f"there is no backup `{name[:60]}` in {self.root}; `eft backup list` shows them")
        chosen = name or names[-1]
        try:
            document = json.loads((self.snapshots / chosen / SNAPSHOT).read_bytes())
            if document["format"] != FORMAT:
                raise BackupError(f"{chosen} has format {document['format']}; this version reads {FORMAT}")
            return Snapshot(**document)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BackupError(f"the snapshot {chosen} cannot be read: {error}") from error

    def folder(self, snapshot: Snapshot) -> Path:
        return self.snapshots / snapshot.name

    def kept(self, snapshot: Snapshot) -> Iterator[KeptFile]:
        """What it names. Raises BackupError where the list of it is not the one that was written."""
        path = self.folder(snapshot) / FILES
        if sha256_of(path) != snapshot.sums.get(FILES):
            raise BackupError(f"the snapshot {snapshot.name} is damaged: its {FILES} is not the one that was written")
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield KeptFile(**json.loads(line))

    def finish(self, aside: Path, snapshot: Snapshot) -> None:
        """Everything it names is on the disk: let it appear."""
        write_private(aside / SNAPSHOT, json.dumps(asdict(snapshot), indent=1).encode())
        sync(self.objects)
        sync(aside)
        aside.rename(self.snapshots / snapshot.name)
        sync(self.snapshots)

    def damage(self, snapshot: Snapshot, *, content: bool = True) -> Iterator[str]:
        """What is wrong with a snapshot, one line a fault; `content`: read every byte again."""
        readable = True
        for name, expected in snapshot.sums.items():
            found = sha256_of(self.folder(snapshot) / name)
            if found != expected:
                readable = readable and name != FILES
                yield f"{name}: {'not there' if found is None else 'its SHA-256 is another'}"
        if readable:
            for kept in self.kept(snapshot):
                if not self.has(kept.sha256, kept.bytes):
                    yield f"{kept.path}: its content is not there, or has another size"
                elif content and sha256_of(self.object(kept.sha256)) != kept.sha256:
                    yield f"{kept.path}: its content has another SHA-256"

    def prune(self, keep: int) -> tuple[list[str], int]:
        """Remove all but the newest `keep` snapshots, and the content that none of those names. Call while writing."""
        gone, stay = self.names()[:-keep], self.names()[-keep:]
        # First: what cannot be read any more does not say what it needs.
        used = {kept.sha256 for name in stay for kept in self.kept(self.read(name))}
        for name in gone:
            removal.remove(self.snapshots / name, ASIDE)
        freed = 0
        for path in self.objects.glob("??/*"):
            if path.name not in used:
                freed += path.stat().st_size
                path.unlink()
        return gone, freed


def opened(path: Path) -> IO[bytes]:
    """A plain file, which is read to its end whatever becomes of its name. Raises FileChanged when there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise FileChanged(f"{error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileChanged("not a plain file")
    return os.fdopen(descriptor, "rb")


def sha256_of(path: Path) -> str | None:
    """None: there is no such file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return None
