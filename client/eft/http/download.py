"""Where downloads go on this side: paths that may be written, and files that are whole or not there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from eft.errors import DownloadError

CHUNK = 1 << 20
Advance = Callable[[int], None]
"""Told how many bytes came, for a progress bar."""


def local_path(folder: Path, path: str) -> Path:
    """Where an artifact may be written below `folder`. Raises DownloadError for a path that leads out of it.

    The server is not trusted with this: `..`, absolute paths, backslashes, control characters and symbolic links
    that point elsewhere are all refused.
    """
    pure = PurePosixPath(path)
    # PurePosixPath forgets a doubled `/` and a `.`, so the parts are looked at as they came.
    parts = path.split("/")
    if pure.is_absolute() or any(part in ("", ".", "..") for part in parts):
        raise DownloadError(f"the server names an artifact {path!r}, which is not a path below a folder")
    if any(ord(character) < 32 or character in "\\:\x7f" for character in path):
        raise DownloadError(f"the server names an artifact {path!r}, which has characters no artifact has")
    target = folder.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(f"{target} lies behind a symbolic link that leads out of {folder}")
    return target


def is_there(target: Path, sha256: str) -> bool:
    """The very file has been brought before."""
    return target.is_file() and not target.is_symlink() and digest(target) == sha256


class Part:
    """What there is of a file, beside where it is to stand; what an earlier download has left of it is taken over.

    `advance` is told every byte that is there; a start over counts back. All of it may raise OSError.
    """

    def __init__(self, target: Path, sha256: str, advance: Advance) -> None:
        self._target, self._advance = target, advance
        target.parent.mkdir(parents=True, exist_ok=True)
        self._path = target.with_name(f".{target.name}.{sha256[:12]}.part")
        if self._path.is_symlink():
            self._path.unlink()
        self._stream = self._path.open("ab+")
        self._seen = hashlib.sha256()
        self._stream.seek(0)
        while chunk := self._stream.read(CHUNK):
            self._seen.update(chunk)
        self.bytes = self._stream.tell()
        advance(self.bytes)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes received so far."""
        return self._seen.hexdigest()

    def add(self, chunk: bytes) -> None:
        self._stream.write(chunk)
        self._seen.update(chunk)
        self.bytes += len(chunk)
        self._advance(len(chunk))

    def start_over(self) -> None:
        self._advance(-self.bytes)
        self._stream.truncate(0)
        self._stream.seek(0)
        self._seen, self.bytes = hashlib.sha256(), 0

    def finish(self) -> None:
        """It is whole: give it its name, in one step, on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._path.replace(self._target)
        _sync_folder(self._target.parent)

    def discard(self) -> None:
        self._path.unlink()

    def close(self) -> None:
        self._stream.close()


def digest(path: Path) -> str:
    """SHA-256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
