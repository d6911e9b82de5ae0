"""Rows of a run in memory, checked by the same code that checked the upload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.data.checker import RowChecker
from core.data.containers.read import values
from core.data.faults import Faults
from core.data.rows import Numbered
from core.data.stream import RowStream, faulty
from core.errors import DataError
from core.spec.data import RowFormat
from core.spec.run import DataOrder


def read_rows(order: DataOrder, between: Callable[[], None] = lambda: None) -> tuple[list[Numbered], RowFormat]:
    """All rows of one pass over an order, and their format (of mixed sources: one of theirs). `between` runs before
    each row. DataError with every fault of a file (the first fifty) when one is wrong, or when raw text is mixed with
    other rows.
    """
    stream = RowStream(order)
    rows: list[Numbered] = []
    try:
        for _, numbered in stream.rows():
            between()
            rows.append(numbered)
    except DataError as error:
        if error.faults:
            raise _all_faults(order, error) from error
        raise
    formats = stream.formats()
    if len(formats) > 1 and "text" in formats:
        raise DataError(
            "raw text is learned as a whole and the other rows by their answers; train on them one after the other",
            field="data.train",
        )
    return rows, next(iter(formats))


def data_files(order: DataOrder) -> list[Path]:
    """Every file that the rows may come from."""
    return [Path(path) for source in order.sources for path in source.paths]


def _all_faults(order: DataOrder, first: DataError) -> DataError:
    """Read the faulty file to its end, so that its user need not come back for every single fault."""
    for source in order.sources:
        for path in source.paths:
            columns = {str(ours): theirs for ours, theirs in source.columns.items()}
            faults = Faults(columns)
            checker = RowChecker(source.format, columns, faults)
            everything = source.format == "prompt"
            for _, number, value in values(Path(path), columns, faults, everything=everything):
                checker.row(number, value)
            if faults.count:
                return faulty(Path(path), faults)
    return first
