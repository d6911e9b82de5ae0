"""What lasts, by key: the data root as a folder that all boxes share, or as an object store.

A key is a path below the data root (`files/file-…`, `runs/job-…/attempt-1/artifacts/…`), the same in both. What is
written under a key is there whole or not at all. Processes that work on files (the trainer, above all) have them below
`Settings.root`: with a folder that is the data root itself, with an object store a folder of this box's own, into which
a worker brings what it needs (worker/staging.py).
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from core.base.files import sync, write_private
from core.errors import EftError


class StoreAway(EftError):
    """The data root cannot be reached now, or refuses; the message says what it said."""

    code = "data_root_away"
    status = 503


class ObjectChanged(OSError):
    """There is something else under that key than was stored."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Something that lies under a key."""

    key: str
    bytes: int
    modified: float
    """Seconds since 1970, by the store's clock."""


class ObjectReader(ABC):
    """Bytes of one object, from where it was opened on."""

    @abstractmethod
    def read(self, size: int) -> bytes:
        """At most so many; empty at the end. Raises OSError when they are gone, StoreAway."""

    @abstractmethod
    def close(self) -> None: ...


class Incoming(ABC):
    """An object on its way: `write` as the bytes come, then `finish`; `abort` in every other case."""

    @abstractmethod
    def write(self, data: bytes) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Make the object permanent."""

    @abstractmethod
    def abort(self) -> None:
        """Discard the object, with everything written so far."""


class Store(ABC):
    """Safe to use from several threads. Everything raises StoreAway where the store does not do as it is told."""

    where: str
    """The folder or the URL, for people."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole of a small object. Raises FileNotFoundError."""

    @abstractmethod
    def create(self, key: str, content: bytes) -> bool:
        """A small object, where nothing is. False: there was something, which stays."""

    @abstractmethod
    def write(self, key: str, content: bytes) -> None:
        """A small object, in place of what may be there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Nothing there is fine."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes; None: there is no such object."""

    @abstractmethod
    def open(self, key: str, *, size: int | None, start: int, length: int) -> ObjectReader:
        """Read `length` bytes from `start` on. Raises FileNotFoundError, or ObjectChanged for another size."""

    @abstractmethod
    def incoming(self, key: str, part: Path) -> Incoming:
        """An object that is written to the local file `part` meanwhile, which is gone afterwards."""

    @abstractmethod
    def tree(self, prefix: str) -> Iterator[StoredObject]:
        """All objects below `prefix` (no `/` at its end), in no order."""

    @abstractmethod
    def discard(self, prefix: str) -> None:
        """Delete all objects below `prefix`, or the one of that name."""


class Folder(Store):
    """The data root is a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def read(self, key: str) -> bytes:
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"{self.where}: there is no `{key}`") from error
        except OSError as error:
            raise StoreAway(f"the data root {self.where} cannot be read: {error.strerror or error}") from error

    def create(self, key: str, content: bytes) -> bool:
        path = self.root / key
        aside = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            write_private(aside, content)
            try:
                os.link(aside, path)
            except FileExistsError:
                return False
            finally:
                aside.unlink(missing_ok=True)
            sync(path.parent)
        except OSError as error:
            raise StoreAway(f"the data root {self.where} cannot be written to: {error.strerror or error}") from error
        return True

    def write(self, key: str, content: bytes) -> None:
        try:
            write_private(self.root / key, content)
        except OSError as error:
            raise StoreAway(f"the data root {self.where} cannot be written to: {error.strerror or error}") from error

    def delete(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)

    def size(self, key: str) -> int | None:
        try:
            return (self.root / key).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, key: str, *, size: int | None, start: int, length: int) -> ObjectReader:
        try:  # a pipe in that place would be waited for without the last flag
            descriptor = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ObjectChanged(f"{key} is not what was stored: it is a link") from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or size not in (None, found.st_size):
            os.close(descriptor)
            raise ObjectChanged(f"{key} is not what was stored: its size has changed")
        return _Descriptor(descriptor, start, length)

    def incoming(self, key: str, part: Path) -> Incoming:
        return _Rename(part, self.root / key)

    def tree(self, prefix: str) -> Iterator[StoredObject]:
        waiting = [self.root / prefix]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as found:
                    entries = list(found)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                    continue
                with suppress(FileNotFoundError):  # gone meanwhile
                    seen = entry.stat(follow_symlinks=False)
                    yield StoredObject(str(Path(entry.path).relative_to(self.root)), seen.st_size, seen.st_mtime)

    def discard(self, prefix: str) -> None:
        path = self.root / prefix
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class _Descriptor(ObjectReader):
    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self._descriptor, self._at, self._end = descriptor, start, start + length

    def read(self, size: int) -> bytes:
        data = os.pread(self._descriptor, min(size, self._end - self._at), self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Rename(Incoming):
    """The part is on the data root's file system already."""

    def __init__(self, part: Path, path: Path) -> None:
        self._part, self._path = part, path

    def write(self, data: bytes) -> None:
        return None

    def finish(self) -> None:
        self._part.replace(self._path)
        sync(self._path.parent)

    def abort(self) -> None:
        self._part.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
