"""A tar archive made as it is sent: never more of it in memory than a block.

POSIX.1-2001 (pax), the format that every tar reads, whatever the length of names and files. What an entry holds has to
be known in size before it begins; rows are therefore written to an unnamed temporary file first.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from core.storage.store import ObjectReader

BLOCK = 256 << 10
MANIFEST = "MANIFEST.jsonl"


class Archive:
    """Each method yields the bytes to send next, in the order of its calls; `end` is the last. Close it afterwards."""

    def __init__(self, top: str, folder: Path, at: float) -> None:
        """`top`: the one folder in it. `folder`: where temporary files may lie. `at`: the time of all entries."""
        self._top, self._folder, self._at = top, folder, int(at)
        self._manifest = self.temporary()
        self._files = self._bytes = 0

    def temporary(self) -> IO[bytes]:
        """It has no name, so nothing is left of it whatever happens."""
        return tempfile.TemporaryFile(dir=self._folder)

    def close(self) -> None:
        self._manifest.close()

    def document(self, name: str, document: Any) -> Iterator[bytes]:
        yield from self.text(name, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def text(self, name: str, text: str) -> Iterator[bytes]:
        data = text.encode()
        yield from self._entry(name, len(data), iter([data]))

    def rows(self, name: str, rows: AbstractContextManager[Iterable[dict[str, Any]]]) -> Iterator[bytes]:
        """JSON Lines. All of `rows` is read before the first byte is sent: no reader of ours holds a transaction."""
        with self.temporary() as file:
            with rows as found:
                for row in found:
                    file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            size = file.tell()
            file.seek(0)
            yield from self._entry(name, size, _blocks(file, size))

    def object(self, name: str, source: ObjectReader, size: int) -> Iterator[bytes]:
        """Raises OSError where it became shorter: the archive cannot be gone on with."""
        yield from self._entry(name, size, _of(source, size, name))

    def missing(self, name: str, why: str) -> None:
        """It should be here, and is not."""
        self._tell({"path": name, "missing": why})

    def end(self) -> Iterator[bytes]:
        self._tell({"complete": True, "files": self._files, "bytes": self._bytes})
        size = self._manifest.tell()
        self._manifest.seek(0)
        yield self._header(MANIFEST, size)
        yield from _blocks(self._manifest, size)
        yield _padding(size)
        yield b"\0" * 1024

    def _entry(self, name: str, size: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
        digest = hashlib.sha256()
        yield self._header(name, size)
        for block in blocks:
            digest.update(block)
            yield block
        yield _padding(size)
        self._files += 1
        self._bytes += size
        self._tell({"path": name, "bytes": size, "sha256": digest.hexdigest()})

    def _header(self, name: str, size: int) -> bytes:
        info = tarfile.TarInfo(f"{self._top}/{name}")
        info.size, info.mtime, info.mode = size, self._at, 0o600
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

    def _tell(self, line: dict[str, Any]) -> None:
        self._manifest.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    left = size
    while left:
        block = file.read(min(BLOCK, left))
        left -= len(block)
        yield block


def _of(source: ObjectReader, size: int, name: str) -> Iterator[bytes]:
    try:
        left = size
        while left:
            block = source.read(min(BLOCK, left))
            if not block:
                raise OSError(f"{name} became shorter while it was sent")
            left -= len(block)
            yield block
    finally:
        source.close()


def _padding(size: int) -> bytes:
    return b"\0" * (-size % tarfile.BLOCKSIZE)
