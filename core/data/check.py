"""A whole file checked: what it is, how many rows, and every fault.

An upload is checked while it streams (`FileCheck`), a file on a disk by `check_file`. Memory is that of one row and one
chunk, whatever the size of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from core.data import parallel
from core.data.checker import RowChecker
from core.data.containers.jsonl import JsonLines
from core.data.containers.read import CHUNK_BYTES, splitter, unit_of, values
from core.data.containers.record import Container, Record, Splitter
from core.data.containers.sniff import HEAD_BYTES, NotRows, sniff
from core.data.fast import UsualLines
from core.data.faults import Faults, Unit
from core.data.formats.settle import SHAPES
from core.data.ignored import notices, template_fields
from core.errors import Fault
from core.spec.axes.data import Format, RowFormat
from core.spec.axes.pairs import told

MAX_PARQUET_FAULTS = 10_000
"""A billion rows without a value fit into very few bytes; nobody has to read on for the faults of all of them."""
MAX_IGNORED = 100
"""Columns that are named as ignored: reports are kept with their files."""
EMPTY = f"the file has no rows; a row is an object with {SHAPES}"


@dataclass(frozen=True, slots=True)
class FileReport:
    """What a whole file turned out to be."""

    rows: int
    """Rows without a fault."""
    format: RowFormat | None
    """None when no row had a recognisable format."""
    faults: tuple[Fault, ...]
    """The first MAX_FAULTS of them, in the order of the file."""
    fault_count: int
    """All of them, as far as the file was read."""
    container: Container | None = None
    """None for a file that holds no rows we read."""
    unit: Unit = "line"
    columns: dict[str, str] = field(default_factory=dict)
    """The mapping that was used: our name, the file's name."""
    notices: tuple[Fault, ...] = ()
    """What is not wrong, but to be known."""
    ignored_columns: tuple[str, ...] = ()
    """Columns that no row is trained on, as the file calls them."""

    @property
    def ok(self) -> bool:
        return self.fault_count == 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "container": self.container,
            "rows": self.rows,
            "format": self.format,
            "columns": self.columns,
            "ignored_columns": list(self.ignored_columns),
            "fault_count": self.fault_count,
            "faults": [fault.as_dict() for fault in self.faults],
            "notices": [notice.as_dict() for notice in self.notices],
        }


class FileCheck:
    """Feed it a file by chunks, cut anywhere, then ask `finish`."""

    def __init__(
        self,
        declared: Format = "auto",
        columns: Mapping[str, str] | None = None,
        *,
        most_faults: int | None = None,
    ) -> None:
        """`most_faults`: read no further once there are more. None: to the end, and of Parquet as far as
        MAX_PARQUET_FAULTS."""
        self._most_faults = most_faults
        self._declared: Format = declared
        self._columns = dict(columns or {})
        self._faults = Faults(self._columns)
        self.checker = RowChecker(declared, self._columns, self._faults)
        self.container: Container | None = None
        self._head = bytearray()
        self._reader: Splitter | None = None
        self._usual: UsualLines | None = None
        self._first: dict[str, Any] | None = None
        """The first good row, as it stands in the file."""
        self._rest = b""
        self._over = False

    @property
    def fault_count(self) -> int:
        """Faults so far: whoever streams need not go on for ever behind the first ones."""
        return self._faults.count

    def feed(self, chunk: bytes) -> None:
        if self._over:
            return
        if self.container is None:
            self._head += chunk
            if len(self._head) < HEAD_BYTES:
                return
            chunk = self._begin()
        if self._reader is not None and chunk:
            self._text(chunk)

    def in_parallel(self, path: Path, stream: BinaryIO) -> None:
        """Take the file from its beginning as far as several processes can help: all of it, or its first lines alone
        when it is no JSON Lines file with usual rows. `stream` is left behind what was taken."""
        head = stream.read(CHUNK_BYTES)
        start = head.rfind(b"\n") + 1
        self.feed(head[:start])
        stream.seek(start)
        reader, row_format = self._reader, self.checker.format
        if not isinstance(reader, JsonLines) or self._first is None or row_format is None:
            return
        for block in parallel.glance(path, start, row_format, self._columns, self._first):
            if block.usual is not None and reader.between_rows():
                reader.passed(block.usual.rows, block.end - block.start)
                self.checker.good(*block.usual)
                continue
            stream.seek(block.start)
            left = block.end - block.start
            while left and (chunk := stream.read(min(left, CHUNK_BYTES))):
                self._records(chunk)
                left -= len(chunk)
        stream.seek(0, 2)

    def finish(self, path: Path | None = None) -> FileReport:
        """The report over all that was fed. `path`: where the bytes lie by now; Parquet is read from there, since its
        directory is at its end. A file without any row is a fault of its own."""
        if self.container is None and not self._over:
            chunk = self._begin()
            if self._reader is not None and chunk:
                self._text(chunk)
        if self.container == "parquet":
            if path is None:
                raise ValueError("a Parquet file is checked where it lies")
            everything = self._declared == "prompt"
            for _, number, value in values(path, self._columns, self._faults, everything=everything):
                if self.checker.row(number, value) is not None and self._first is None:
                    self._first = value
                if self._faults.count > MAX_PARQUET_FAULTS or self._enough():
                    break
        elif self._reader is not None:
            if self._rest:
                self._records(self._rest)
                self._rest = b""
            for record in () if self._enough() else self._reader.finish():
                self._record(record)
        return self.report()

    def report(self) -> FileReport:
        """As far as it has come."""
        faults, count = tuple(self._faults.kept), self._faults.count
        if self.checker.rows == 0 and count == 0:
            faults, count = (Fault("empty_file", EMPTY),), 1
        unit = self._faults.unit
        return FileReport(
            self.checker.rows, self.checker.format, faults, count, self.container, unit, self._columns,
            (
                *notices(self.checker.format, self._faults.ignored),
                *template_fields(self._faults.fields),
                *self._faults.notices(),
                *self._pairs(),
                *self._one_class(),
            ),
            tuple(self._faults.ignored)[:MAX_IGNORED],
        )  # fmt: skip

    def _pairs(self) -> tuple[Fault, ...]:
        """What training makes of rows that are two strings."""
        prompt = (self._first or {}).get(self._columns.get("prompt", "prompt"))
        if self.checker.format != "prompt_completion" or not isinstance(prompt, str):
            return ()
        return (
            Fault("pairs", f"pairs of strings: {told('auto')} `data.rendering.pairs` of the job chooses another way."),
        )

    def _one_class(self) -> tuple[Fault, ...]:
        """A file of judged answers may be one of several sources, so one class alone is no fault of the file."""
        if len(self.checker.labels) != 1:
            return ()
        (label,) = self.checker.labels
        said, lacking = ("true", "false") if label else ("false", "true")
        words = (
            f"every `{self._columns.get('label', 'label')}` is {said}: `stage: kto` needs good and bad answers. Add "
            f"rows whose label is {lacking}, or train on this file together with one that has them (`data.train` as a "
            "list)"
        )
        return (Fault("one_class", words),)

    def _begin(self) -> bytes:
        """Settle what the file is; the bytes that were held back for that."""
        held = bytes(self._head)
        self._head.clear()
        try:
            self.container = sniff(held[:HEAD_BYTES], self._columns)
        except NotRows as error:
            self._faults.add_file(error.code, str(error))
            self._over = True
            return b""
        self._faults.unit = unit_of(self.container)
        if self.container != "parquet":
            self._reader = splitter(self.container, self._columns)
        return held

    def _text(self, chunk: bytes) -> None:
        """JSON Lines go by blocks of whole lines, most of which need no more than one glance; all else by records."""
        if not isinstance(self._reader, JsonLines):
            self._records(chunk)
            return
        end = chunk.rfind(b"\n") + 1
        if not end:  # the middle of a long line: its reader knows when it is too long
            self._records(self._rest + chunk)
            self._rest = b""
            return
        block = self._rest + chunk[:end]
        self._rest = chunk[end:]
        if self._usual is None and self._first is not None and self.checker.format is not None:
            self._usual = UsualLines(self.checker.format, self._columns, self._first)
        usual = self._usual.rows(block) if self._usual is not None and self._reader.between_rows() else None
        if usual is None:
            self._records(block)
        else:
            self._reader.passed(usual.rows, len(block))
            self.checker.good(*usual)

    def _records(self, chunk: bytes) -> None:
        assert self._reader is not None
        for record in self._reader.feed(chunk):
            self._record(record)
            if self._reader.finished:
                self._over = True
            if self._enough():
                self._over = True
                return

    def _enough(self) -> bool:
        return self._most_faults is not None and self._faults.count > self._most_faults

    def _record(self, record: Record) -> None:
        assert self._reader is not None
        self._faults.number = record.number
        if record.fault is not None:
            self._faults.add(*record.fault)
            return
        before = self._faults.count
        value = self._reader.decode(record, self._faults)
        if self._faults.count == before and self.checker.row(record.number, value) is not None:
            self._first = self._first or value


def check_file(path: Path, *, format: Format = "auto", columns: Mapping[str, str] | None = None) -> FileReport:
    """Every fault of a file on this machine; large JSON Lines files are looked at by several processes. Raises OSError
    when it cannot be read."""
    check = FileCheck(format, columns)
    with path.open("rb") as stream:
        if path.stat().st_size >= parallel.WORTH_BYTES and parallel.processes() > 1:
            check.in_parallel(path, stream)
        while chunk := stream.read(CHUNK_BYTES):
            check.feed(chunk)
    return check.finish(path)
