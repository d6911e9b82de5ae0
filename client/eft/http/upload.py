"""What an upload reads from."""

from __future__ import annotations

from collections.abc import Callable
from typing import IO


class Counted:
    """A file that tells how much of it was read."""

    def __init__(self, stream: IO[bytes], advance: Callable[[int], None]) -> None:
        self._stream, self._advance = stream, advance

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        self._advance(len(chunk))
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def fileno(self) -> int:
        return self._stream.fileno()
