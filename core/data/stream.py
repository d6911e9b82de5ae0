"""The rows of one side of a run, one after another, from any place on: a file, many files, a mixture, a part of them.

A stream holds one row and one chunk of every source, never a file. With each row comes the cursor behind it: plain JSON
that goes into a checkpoint, from which `rows` goes on with the very next row.

The next source of a weighted mixture is a pure function of seed and the number of rows drawn so far. As with
`datasets.interleave_datasets(…, probabilities)`, the order of draws does not depend on how many rows a source has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, assert_never

from core.data.checker import RowChecker
from core.data.containers.read import Place, values
from core.data.faults import Faults
from core.data.rows import Numbered, Row
from core.errors import DataError, beyond
from core.spec.axes.data import HashSplit, RowFormat
from core.spec.run.orders import DataFiles, DataOrder

Cursor = dict[str, Any]
"""JSON. What is in it is the stream's own affair."""

SHOWN = 3
MOST_PASSES = 1000
"""Over one source within an epoch of a weighted mixture: more is a mistake in the weights, and would fill a disk."""


class RowStream:
    """Reads an order again and again: each call of `rows` is one pass over it."""

    def __init__(self, order: DataOrder) -> None:
        self._order = order
        self._sources = [_Source(files) for files in order.sources]
        self._weighted = len(order.sources) > 0 and order.sources[0].weight is not None

    def rows(self, cursor: Cursor | None = None) -> Iterator[tuple[Cursor, Numbered]]:
        """Rows of one pass and the cursor behind each, from the first one or from behind `cursor`.

        Raises DataError at the first faulty row, with its place, or when a pass has no row at all.
        """
        found = self._drawn(cursor) if self._weighted else self._one_by_one(cursor)
        split, part = self._order.split, self._order.part
        any_row = cursor is not None
        for behind, numbered in found:
            if split is None or part == "all" or held_out(numbered.row, split) == (part == "eval"):
                any_row = True
                yield behind, numbered
        if not any_row:
            raise self._empty()

    def formats(self) -> set[RowFormat]:
        """Formats of the rows read so far, one a source."""
        return {source.format for source in self._sources if source.format is not None}

    def _one_by_one(self, cursor: Cursor | None) -> Iterator[tuple[Cursor, Numbered]]:
        at = 0 if cursor is None else cursor["source"]
        inner = None if cursor is None else cursor["of"]
        for index in range(at, len(self._sources)):
            for behind, numbered in self._sources[index].rows(inner):
                yield {"source": index, "of": behind}, numbered
            inner = None

    def _drawn(self, cursor: Cursor | None) -> Iterator[tuple[Cursor, Numbered]]:
        """By weight, until the stopping strategy is met. A source that ends before begins anew."""
        count = len(self._sources)
        drawn: int = 0 if cursor is None else cursor["drawn"]
        states: list[Any] = [None] * count if cursor is None else list(cursor["of"])
        passes: list[int] = [0] * count if cursor is None else list(cursor["passes"])
        if self._over(passes):
            return
        bounds = list(accumulate(source.weight for source in self._sources))
        reading = [source.rows(state) for source, state in zip(self._sources, states, strict=True)]
        ahead: list[tuple[Any, Numbered] | None] = [next(rows, None) for rows in reading]
        # A source counts as read once its last row is handed out, so each is known one row ahead.
        for index in range(count):
            if ahead[index] is None:
                if states[index] is None:
                    return  # a source without rows: nothing could be drawn by these weights
                reading[index], states[index] = self._sources[index].rows(None), None
                ahead[index] = next(reading[index], None)
        while True:
            point = _uniform(self._order.seed, drawn) * bounds[-1]
            index = next((at for at, bound in enumerate(bounds) if point < bound), count - 1)
            current = ahead[index]
            if current is None:
                return
            drawn += 1
            states[index], numbered = current
            ahead[index] = next(reading[index], None)
            if ahead[index] is None:
                passes[index] += 1
                if passes[index] > MOST_PASSES:
                    raise self._far_apart(index)
                reading[index] = self._sources[index].rows(None)
                ahead[index] = next(reading[index], None)
            yield {"drawn": drawn, "of": list(states), "passes": list(passes)}, numbered
            if self._over(passes):
                return

    def _over(self, passes: list[int]) -> bool:
        """`passes`: how often each source was read to its end."""
        match self._order.stopping_strategy:
            case "first_exhausted":
                return any(passes)
            case "all_exhausted":
                return all(passes)
            case _ as never:
                assert_never(never)

    def _far_apart(self, index: int) -> DataError:
        words = (
            f"the weights are so far apart that one epoch reads this source more than {MOST_PASSES} times before the "
            "others are read once: bring the weights together, or take `stopping_strategy: first_exhausted`"
        )
        return DataError(words, field=self._order.sources[index].field)

    def _empty(self) -> DataError:
        field = self._order.sources[0].field if self._order.sources else "data.train"
        match self._order.part:
            case "eval":
                words = "`data.split` holds no row out: raise eval_fraction, or give more rows"
                return DataError(words, field="data.split")
            case "train":
                return DataError("`data.split` leaves no row to train on: lower eval_fraction", field="data.split")
            case _:
                return DataError("there are no rows", field=field)


class _Source:
    """Files that are read as one."""

    def __init__(self, files: DataFiles) -> None:
        self._files = files
        self.weight = files.weight if files.weight is not None else 1.0
        self.format: RowFormat | None = None

    def rows(self, cursor: Any) -> Iterator[tuple[Any, Numbered]]:
        first, place, known, settled_at = (0, None, None, 0) if cursor is None else cursor
        columns = {str(ours): theirs for ours, theirs in self._files.columns.items()}
        empty = cursor is None
        for index in range(first, len(self._files.paths)):
            path = Path(self._files.paths[index])
            faults = Faults(columns)
            checker = RowChecker(self._files.format, columns, faults)
            if known is not None:
                checker.settle_on(known, settled_at)
            for behind, numbered in file_rows(path, checker, place):
                if checker.format != known:
                    known, settled_at = checker.format, numbered.line
                    self.format = known
                empty = False
                yield [index, behind, known, settled_at], numbered
            if faults.count:
                raise faulty(path, faults)
            place = None
        if empty:
            raise DataError("there are no rows in it", field=self._files.field)


def file_rows(path: Path, checker: RowChecker, place: Place | None = None) -> Iterator[tuple[Place, Numbered]]:
    """Rows of one file behind `place`, up to the first faulty one. Raises DataError when it cannot be read."""
    faults = checker.faults
    everything = checker.format == "prompt"
    try:
        for behind, number, value in values(path, checker.columns, faults, everything=everything, place=place):
            row = checker.row(number, value) if faults.count == 0 else None
            if row is None:
                return
            yield behind, Numbered(number, row)
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror}", field="data.train") from error


def faulty(path: Path, faults: Faults) -> DataError:
    """What a file's faults look like in one error."""
    kept = tuple(faults.kept)
    shown = "; ".join(f"{fault.field}: {fault.message}" if fault.field else fault.message for fault in kept[:SHOWN])
    more = beyond(faults.count, kept[:SHOWN])
    tail = f"; and {more} more" if more > 0 else ""
    return DataError(f"{path.name}: {shown}{tail}", field=kept[0].field, faults=kept)


# --- splits ----------------------------------------------------------------------------------------


def held_out(row: Row, split: HashSplit) -> bool:
    """Whether a row is on the evaluation's side: decided by what is in it, so wherever it stands."""
    digest = hashlib.sha256(b"split %d " % split.seed + content(row)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < split.eval_fraction


def content(row: Row) -> bytes:
    """A row's content in one canonical form, equal for equal rows of whatever file."""
    return json.dumps([type(row).__name__, _plain(row)], sort_keys=True, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) that depends on seed and draw alone."""
    digest = hashlib.sha256(b"mixture %d %d" % (seed, draw)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
