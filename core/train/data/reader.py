"""Rows of a JSONL file, checked by the same code that checked the upload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.data.checker import MAX_LINE_BYTES, RowChecker
from core.data.rows import Numbered, RowFormat
from core.errors import DataError
from core.spec.data import Format
from core.spec.run import DataOrder

SHOWN = 3


def read_rows(order: DataOrder) -> tuple[list[Numbered], RowFormat]:
    """All rows of one side of a run, and their format. DataError with every fault (the first fifty) when one is
    wrong."""
    rows: list[Numbered] = []
    settled: RowFormat | None = None
    for source in order.sources:
        for path in source.paths:
            found, settled = _read_file(Path(path), source.format)
            rows += found
    if settled is None:
        raise DataError("there are no rows", field="data.train")
    return rows, settled


def data_files(order: DataOrder) -> list[Path]:
    """Every file that the rows may come from."""
    return [Path(path) for source in order.sources for path in source.paths]


def _read_file(path: Path, declared: Format) -> tuple[list[Numbered], RowFormat]:
    checker = RowChecker(declared)
    rows = [Numbered(line, row) for line, raw in _lines(path) if (row := checker.feed_line(line, raw)) is not None]
    report = checker.finish()
    if not report.ok or report.format is None:
        shown = "; ".join(f"{fault.field or path.name}: {fault.message}" for fault in report.faults[:SHOWN])
        more = report.fault_count - min(SHOWN, len(report.faults))
        tail = f"; and {more} more" if more > 0 else ""
        raise DataError(f"{path.name}: {shown}{tail}", field=report.faults[0].field, faults=report.faults)
    return rows, report.format


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as stream:
            line = 0
            while raw := stream.readline(MAX_LINE_BYTES + 2):
                line += 1
                yield line, raw
                if len(raw) > MAX_LINE_BYTES:
                    return  # a fault already; the rest of that line is not a row
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}", field="data.train") from error
