"""JSON Lines (https://jsonlines.org): UTF-8, one object a line, a byte order mark forgiven."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from core.data.containers.record import TOO_LONG, Record, decode_json
from core.data.faults import MAX_ROW_BYTES, Faults

BOM = b"\xef\xbb\xbf"


class JsonLines:
    """Memory: one line and one chunk. Blank lines may end a file; between rows they hide a lost row."""

    def __init__(self, offset: int = 0, number: int = 0) -> None:
        self.number = number
        self.finished = False
        self._offset = offset
        """Offset of the line that is being gathered, bytes."""
        self._rest = bytearray()
        self._skipped = 0
        """Bytes of a line too long to keep; 0: it is not."""
        self._blank_at: int | None = None

    def feed(self, chunk: bytes) -> Iterator[Record]:
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._append(chunk[start:end])
            yield from self._end_of_line(1)
            start = end + 1
        self._append(chunk[start:])

    def finish(self) -> Iterator[Record]:
        if self._rest or self._skipped:
            yield from self._end_of_line(0)

    def decode(self, record: Record, faults: Faults) -> Any:
        return decode_json(record.raw, faults)

    def between_rows(self) -> bool:
        """Nothing of a line has been seen yet, and nothing is owed from the lines before."""
        return not self._rest and not self._skipped and self._blank_at is None

    def passed(self, lines: int, size: int) -> None:
        """Somebody else has read whole lines, none of them blank."""
        self.number += lines
        self._offset += size

    def _append(self, part: bytes) -> None:
        if self._skipped:
            self._skipped += len(part)
            return
        self._rest += part
        if len(self._rest) > MAX_ROW_BYTES + 1:  # a carriage return may be the last byte
            self._skipped = len(self._rest)
            self._rest.clear()

    def _end_of_line(self, newline: int) -> Iterator[Record]:
        raw, size = bytes(self._rest), (self._skipped or len(self._rest)) + newline
        skipped = bool(self._skipped)
        self._rest.clear()
        self._skipped = 0
        self.number += 1
        self._offset += size
        if self.number == 1:
            raw = raw.removeprefix(BOM)
        if skipped or len(raw) > MAX_ROW_BYTES + 1:
            yield Record(self.number, b"", self._offset, TOO_LONG)
            return
        if not raw.strip():
            self._blank_at = self._blank_at or self.number
            return
        if self._blank_at is not None:
            words = ("blank_line", "an empty line between rows; remove it")
            yield Record(self._blank_at, b"", self._offset, words)
            self._blank_at = None
        yield Record(self.number, raw, self._offset)
