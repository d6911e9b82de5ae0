"""Downloads that can go on where they broke off, and are whole or not there."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from eft.errors import DownloadError, LocalError, Unreachable
from eft.transport import Transport

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
        raise DownloadError(f"the server names an artifact {path!r}, which is no path below a folder")
    if any(ord(character) < 32 or character in "\\:\x7f" for character in path):
        raise DownloadError(f"the server names an artifact {path!r}, which has characters no artifact has")
    target = folder.joinpath(*parts)
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(f"{target} lies behind a symbolic link that leads out of {folder}")
    return target


def fetch(
    transport: Transport, url: str, target: Path, *, size: int, sha256: str, patience: float, advance: Advance
) -> None:
    """Bring `url` to `target`: beside it first, checked against `sha256`, then renamed in one step.

    Whatever an earlier, broken-off download of the same content has left is gone on from. Raises DownloadError,
    LocalError, ApiError, Unreachable.
    """
    try:
        if target.is_file() and not target.is_symlink() and digest(target) == sha256:
            advance(size)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{sha256[:12]}.part")
        if part.is_symlink():
            part.unlink()
        _fetch_part(transport, url, part, size=size, sha256=sha256, patience=patience, advance=advance)
        part.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise LocalError(f"{target}: {error.strerror or error}") from error


def _fetch_part(
    transport: Transport, url: str, part: Path, *, size: int, sha256: str, patience: float, advance: Advance
) -> None:
    with part.open("ab+") as stream:
        seen = hashlib.sha256()
        stream.seek(0)
        while chunk := stream.read(CHUNK):
            seen.update(chunk)
        resumed = stream.tell() > 0
        advance(stream.tell())

        def start_over() -> None:
            nonlocal seen
            advance(-stream.tell())
            stream.truncate(0)
            stream.seek(0)
            seen = hashlib.sha256()

        def attempt() -> None:
            have = stream.tell()
            # Identity: a range of a compressed representation would be another range.
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            with transport.stream("GET", url, headers=headers) as response:
                if have and response.status_code != 206:
                    start_over()  # no ranges here: the whole file comes again
                for received in response.iter_bytes(CHUNK):
                    stream.write(received)
                    seen.update(received)
                    advance(len(received))
            if stream.tell() < size:
                raise Unreachable(f"the download of {url} broke off at byte {stream.tell()} of {size}")

        while True:
            while stream.tell() < size:
                before = stream.tell()
                try:
                    transport.persist(attempt, patience)
                except Unreachable:
                    # A connection that breaks again and again, yet brings something each time, is getting there.
                    if stream.tell() <= before:
                        raise
            if stream.tell() == size and seen.hexdigest() == sha256:
                break
            start_over()
            if not resumed:
                part.unlink()
                raise DownloadError(f"{url} came damaged: its SHA-256 is not the one that the server lists; try again")
            resumed = False  # what an earlier download left may have been the damaged part
        stream.flush()
        os.fsync(stream.fileno())


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
