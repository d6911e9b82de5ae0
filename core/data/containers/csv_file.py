"""CSV (RFC 4180): commas, quotes doubled inside quoted fields, a header that names the columns, UTF-8.

Every value is text and stays text: nothing is evaluated. Cells that a spreadsheet would run as a formula are told. In
the columns of lists (`messages`, `conversations`, `tools`, `completions`, `labels`) a cell holds JSON text, in `label`
it is `true` or `false`, in `margin` a number; an empty cell of an optional column is none.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from core.data.containers.jsonl import BOM
from core.data.containers.record import TOO_LONG, Record, decode_json, wrong_columns
from core.data.faults import MAX_ROW_BYTES, Faults

_FIELD = rb'(?:"(?:[^"]|"")*+"|[^",]*+)'
_STRICT = re.compile(rb"%b(?:,%b)*+" % (_FIELD, _FIELD), re.DOTALL)
_FORMULA = re.compile(r"[=@\t\r]|[+-](?!\s|[0-9.,]*$)")
_JSON_CELLS = ("messages", "conversations", "tools", "completions", "labels")
_OPTIONAL_CELLS = ("input", "system", "tools", "reference", "margin")
_NUMBER = re.compile(r"[+-]?\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,2})?", re.ASCII)
_FORMULA_WORDS = (
    "a cell begins as a spreadsheet formula does (=, +, -, @); it is trained on as the text it is and never evaluated, "
    "but do not open the file in a spreadsheet that you would not trust with it"
)

csv.field_size_limit(MAX_ROW_BYTES)


class CsvRecords:
    """Memory: one record and one chunk. A record may span lines, inside quotes."""

    def __init__(
        self, columns: Mapping[str, str], offset: int = 0, number: int = 0, header: list[str] | None = None
    ) -> None:
        """Goes on behind line `number` at `offset`, with the `header` of the file."""
        self.header = header
        self.number = number
        self.finished = False
        self._lines = number
        self._offset = offset
        self._ours = {theirs: ours for ours, theirs in columns.items()}
        self._rest = bytearray()
        """Bytes of a line whose end has not come yet."""
        self._searched = 0
        """Bytes of that in which no line ends."""
        self._record = bytearray()
        """Whole lines of a record with an open quote."""
        self._quoted = False
        """A quote is open behind those lines."""
        self._begun_at = 0
        self._blank_at: int | None = None

    def feed(self, chunk: bytes) -> Iterator[Record]:
        self._rest += chunk
        start = 0
        while not self.finished and (end := self._rest.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._rest[start : end + 1])
            start = end + 1
            yield from self._line(line)
        del self._rest[:start]
        self._searched = len(self._rest)
        if len(self._rest) + len(self._record) > MAX_ROW_BYTES and not self.finished:
            yield self._dead(self._begun_at or self._lines + 1, *self._too_long())

    def finish(self) -> Iterator[Record]:
        if self._rest and not self.finished:
            line = bytes(self._rest)
            self._rest.clear()
            self._searched = 0
            yield from self._line(line)
        if self._record and not self.finished:
            yield self._dead(self._begun_at, "invalid_csv", "a quote is opened here and never closed")

    def decode(self, record: Record, faults: Faults) -> Any:
        assert self.header is not None
        try:
            cells = parse(record.raw)
        except (ValueError, csv.Error) as error:
            code = "invalid_utf8" if isinstance(error, UnicodeDecodeError) else "invalid_csv"
            words = f"byte {error.start + 1} is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            faults.add(code, words)
            return None
        if len(cells) != len(self.header):
            words = f"{len(cells)} cells where the header has {len(self.header)} columns; quote cells with commas"
            faults.add("invalid_csv", words)
            return None
        before = faults.count
        value = {name: self._cell(name, cell, faults) for name, cell in zip(self.header, cells, strict=True)}
        return None if faults.count > before else value

    def _cell(self, name: str, cell: str, faults: Faults) -> Any:
        ours = self._ours.get(name, name)
        if ours in _OPTIONAL_CELLS and not cell:
            return None
        if ours in _JSON_CELLS:
            before = faults.count
            value = decode_json(cell.encode(errors="surrogatepass"), faults)
            if faults.count > before:
                faults.add("invalid_json", "in CSV this column holds JSON text", ours)
            return value
        if ours == "label" and cell.lower() in ("true", "false"):
            return cell.lower() == "true"
        if ours == "margin" and _NUMBER.fullmatch(cell):
            return float(cell)
        if _FORMULA.match(cell):
            faults.notice("formula", _FORMULA_WORDS)
        return cell

    def _line(self, line: bytes) -> Iterator[Record]:
        self._lines += 1
        self._offset += len(line)
        if self._lines == 1:
            line = line.removeprefix(BOM)
        if not self._record:
            self._begun_at = self._lines
        self._record += line
        if len(self._record) > MAX_ROW_BYTES:
            yield self._dead(self._begun_at, *self._too_long())
            return
        self._quoted ^= line.count(b'"') % 2 == 1
        if self._quoted:
            return  # the record goes on in the next line
        raw = bytes(self._record).removesuffix(b"\n").removesuffix(b"\r")
        self._record.clear()
        if not raw.strip():
            self._blank_at = self._blank_at or self._begun_at
            return
        if self._blank_at is not None:
            yield Record(self._blank_at, b"", self._offset, ("blank_line", "an empty line between rows; remove it"))
            self._blank_at = None
        if self.header is None:
            yield from self._take_header(raw)
        else:
            self.number = self._lines
            yield Record(self._begun_at, raw, self._offset)

    def _take_header(self, raw: bytes) -> Iterator[Record]:
        try:
            names = [name.strip() for name in parse(raw)]
        except (ValueError, csv.Error) as error:
            yield self._dead(self._begun_at, "invalid_csv", f"the header cannot be read: {error}")
            return
        if (words := wrong_columns(names)) is not None:
            yield self._dead(self._begun_at, "invalid_csv", words)
            return
        self.header = names

    def _too_long(self) -> tuple[str, str]:
        return ("invalid_csv", "a quote is opened here and not closed within 16 MiB") if self._record else TOO_LONG

    def _dead(self, number: int, code: str, words: str) -> Record:
        self.finished = True
        self._rest.clear()
        self._record.clear()
        return Record(number, b"", self._offset, (code, words))


def parse(raw: bytes) -> list[str]:
    """Cells of one record. Raises ValueError or csv.Error for what RFC 4180 does not allow."""
    if b"\0" in raw:
        raise ValueError("holds a NUL byte, which is in no text")
    if b'"' in raw and _STRICT.fullmatch(raw) is None:
        raise ValueError('a quote inside a cell is doubled (""), and the cell is quoted')
    if b'"' not in raw and b"\r" in raw:
        raise ValueError("a lone carriage return; end lines with a line feed")
    (cells,) = csv.reader(io.StringIO(raw.decode(), newline=""), strict=True)
    return cells
