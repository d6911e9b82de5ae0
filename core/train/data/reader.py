"""Rows of a run, checked by the same code that checked the upload."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from core.data.checker import RowChecker
from core.data.containers.read import values, what_is
from core.data.faults import Faults
from core.data.rows import Numbered
from core.data.stream import RowStream, faulty
from core.errors import DataError
from core.spec.axes.data import RowFormat
from core.spec.axes.stage import Stage
from core.spec.run.orders import DataOrder

ALONE: frozenset[RowFormat] = frozenset({"preference", "kto", "stepwise", "prompt"})
"""Formats whose rows are not mixed with those of other formats."""


def rows_of(order: DataOrder) -> tuple[RowFormat, Iterator[Numbered]]:
    """The format of the rows (of mixed sources: one of theirs) and one pass over them, a row in memory at a time.

    Here or on the way DataError, with every fault of a file (the first fifty) when one is wrong, or when raw text is
    mixed with other rows.
    """
    stream = RowStream(order)
    passing = (numbered for _, numbered in stream.rows())
    try:
        first = next(passing)
    except DataError as error:
        raise _whole(order, error) from error
    return min(stream.formats()), _checked(order, stream, itertools.chain([first], passing))


def count_of(order: DataOrder) -> int | None:
    """How many rows there are about, where that can be told without reading them one by one."""
    if order.split is not None or any(source.weight is not None for source in order.sources):
        return None
    count = 0
    for source in order.sources:
        for path in map(Path, source.paths):
            match what_is(path, {str(ours): theirs for ours, theirs in source.columns.items()}):
                case "jsonl":
                    with path.open("rb") as stream:
                        count += sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 20), b""))
                case "parquet":
                    import pyarrow.parquet as pq

                    count += pq.read_metadata(path).num_rows
                case _:
                    return None
    return count


def data_files(order: DataOrder) -> list[Path]:
    """Every file that the rows may come from."""
    return [Path(path) for source in order.sources for path in source.paths]


def _checked(order: DataOrder, stream: RowStream, rows: Iterable[Numbered]) -> Iterator[Numbered]:
    try:
        yield from rows
    except DataError as error:
        raise _whole(order, error) from error
    refuse_mixed(stream.formats())


def refuse_mixed(formats: Collection[RowFormat]) -> None:
    """DataError for formats of which no one loss is right."""
    alone = sorted(set(formats) & ALONE)
    if len(formats) > 1 and alone:
        others = ", ".join(sorted(set(formats) - {alone[0]}))
        raise DataError(
            f"rows of format {alone[0]} cannot be mixed with others ({others}); name sources of one format",
            field="data.train",
        )
    if len(formats) > 1 and "text" in formats:
        raise DataError(
            "raw text is learned as a whole and the other rows by their answers; train on them one after the other",
            field="data.train",
        )


def refuse_rows(stage: Stage, row_format: RowFormat) -> None:
    """DataError for rows that the stage does not learn from."""
    if row_format not in stage.rows:
        raise DataError(
            f"the rows are of format {row_format}, and `stage: {stage.type}` learns from {', '.join(stage.rows)}; "
            "choose another stage, or name the format (`data.train.format`) if these rows are something else",
            field="data.train",
        )


def _whole(order: DataOrder, first: DataError) -> DataError:
    """Read the faulty file to its end, so that its user need not come back for every single fault."""
    if not first.faults:
        return first
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
