"""JSON: one array of rows, or `{"data": [ … ]}`, cut into its rows without ever holding the file.

Brackets and strings are found with one regular expression; what lies between two commas of the outermost level is a row
and goes through the JSON parser by itself. A place is the number of the row: whole files often stand on one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from core.data.containers.jsonl import BOM
from core.data.containers.record import TOO_LONG, Record, decode_json
from core.data.faults import MAX_ROW_BYTES, Faults

HEAD = re.compile(rb'\s*(\[|\{\s*"data"\s*:\s*\[)')
_MARKS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["\[\]{},]', re.DOTALL)
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""The inside of a string, up to its closing quote or the end of the bytes."""
_BROKEN = "the array is not closed: the file ends in the middle of it"


class JsonArray:
    """Memory: one row and one chunk."""

    def __init__(self, offset: int = 0, number: int = 0) -> None:
        """Goes on behind row `number`, whose end is at `offset`."""
        self.number = number
        self.finished = False
        self._begun = number > 0
        self._ends: tuple[bytes, ...] = (b"", b"}")
        """What may stand behind the array: nothing, or the brace of the object around it."""
        self._buffer = bytearray()
        self._base = offset
        """Offset in the file of the buffer's first byte."""
        self._start = 0
        """Where the row that is being gathered begins in the buffer."""
        self._scanned = 0
        self._in_string = False
        """What was scanned ends inside a string."""
        self._depth = 0
        self._between = number > 0
        """A row has just ended: a comma or the end of the array is next."""
        self._closed = False

    def feed(self, chunk: bytes) -> Iterator[Record]:
        self._buffer += chunk
        if not self._begun and not self._begin():
            return
        if not self._closed:
            yield from self._rows()
        if self._closed and not self.finished:
            yield from self._tail(last=False)

    def finish(self) -> Iterator[Record]:
        if self.finished:
            return
        if not self._closed:
            yield self._fault("invalid_json", _BROKEN)
        else:
            yield from self._tail(last=True)

    def decode(self, record: Record, faults: Faults) -> Any:
        return decode_json(record.raw, faults)

    def _begin(self) -> bool:
        if self._base == 0 and self._buffer.startswith(BOM):
            del self._buffer[: len(BOM)]
            self._base += len(BOM)
        head = HEAD.match(self._buffer)
        if head is None:
            return False
        self._begun = True
        self._ends = (b"",) if head.group(1) == b"[" else (b"}",)
        self._start = self._scanned = head.end()
        return True

    def _rows(self) -> Iterator[Record]:
        position = self._scanned
        while not self._closed:
            if self._in_string:
                inside = _INSIDE.match(self._buffer, position)
                position = inside.end() if inside is not None else position
                if self._buffer[position : position + 1] != b'"':
                    break
                position += 1
                self._in_string = False
            mark = _MARKS.search(self._buffer, position)
            if mark is None:
                position = len(self._buffer)
                break
            token = self._buffer[mark.start()]
            position = mark.end()
            if token == 0x22 and position == mark.start() + 1:  # a string that has no end yet
                self._in_string = True
            elif token in b"[{":
                self._depth += 1
            elif token in b"]}" and self._depth:
                self._depth -= 1
            elif token in b",]" and self._depth == 0:
                yield from self._end_of_row(mark.start(), array_ends=token == 0x5D)
                self._start = position
                self._closed = token == 0x5D
            elif token == 0x7D and self._depth == 0:
                yield self._fault("invalid_json", "a closing brace without its opening one")
                return
        self._scanned = position
        self._forget()
        if len(self._buffer) > MAX_ROW_BYTES and not self._closed:
            self.number += 1
            yield Record(self.number, b"", self._base, TOO_LONG)
            self.finished = self._closed = True
            self._buffer.clear()

    def _end_of_row(self, end: int, *, array_ends: bool) -> Iterator[Record]:
        raw = bytes(self._buffer[self._start : end])
        if self._between:
            self._between = False
            if raw.strip():
                yield self._fault("invalid_json", "rows are separated by commas")
            return
        if not raw.strip():
            if not (array_ends and self.number == 0):
                self.number += 1
                words = "a comma without a row behind it" if array_ends else "two commas without a row between them"
                yield Record(self.number, b"", self._base + end, ("invalid_json", words))
            return
        self.number += 1
        fault = TOO_LONG if len(raw) > MAX_ROW_BYTES else None
        yield Record(self.number, b"" if fault else raw.strip(), self._base + end, fault)

    def _tail(self, *, last: bool) -> Iterator[Record]:
        """Behind the array: its brace if it stands in an object, and nothing else."""
        rest = bytes(self._buffer[self._start :]).strip()
        if rest in self._ends or (not last and not rest):
            del self._buffer[self._start + len(rest) :]  # white space without end is nothing to keep
            return
        yield self._fault("invalid_json", 'something stands behind the rows; a file is [ … ] or {"data": [ … ]}')

    def _forget(self) -> None:
        del self._buffer[: self._start]
        self._base += self._start
        self._scanned -= self._start
        self._start = 0

    def _fault(self, code: str, words: str) -> Record:
        self.finished = self._closed = True
        self._buffer.clear()
        return Record(self.number + 1, b"", self._base, (code, words))
