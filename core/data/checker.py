"""From an object to a row: the columns by our names, the file's one format, and every fault on the way.

The same code serves an upload (core/data/check.py) and the trainer (core/data/stream.py). Other keys beside those of
the format are ignored (an `id`, a `source`), unless they make the format ambiguous. Nothing is guessed: a row that fits
two formats, or another one than the rows before it, is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.data.faults import MAX_COLUMNS, TOO_MANY_COLUMNS, Faults, kind
from core.data.formats.read import read
from core.data.formats.settle import READ, SHAPES, fits, missing, nearest
from core.data.mapping import proposed
from core.data.rows import Labelled, Row
from core.spec.axes.data import Format, RowFormat

_OPTIONAL = ("tools", "system", "input", "reference", "margin")
"""Columns that may be mapped and yet be absent from a row."""


class RowChecker:
    """Rows of one file, one after another. Keeps nothing but the format and the faults."""

    def __init__(self, declared: Format, columns: Mapping[str, str], faults: Faults) -> None:
        """`declared`: the format that every row shall have; `auto` lets the rows say."""
        self._declared: RowFormat | None = None if declared == "auto" else declared
        self.columns = dict(columns)
        self._theirs = frozenset(columns.values())
        self.format = self._declared
        self._settled_at = 0
        self.faults = faults
        self.rows = 0
        """Rows without a fault so far."""
        self.labels: set[bool] = set()
        """Labels of the judged answers among them."""
        self._seen: Any = None
        """Keys of the row before."""

    def row(self, number: int, value: Any) -> Row | None:
        """The row at a line (or of a number); None when it has a fault."""
        self.faults.number = number
        before = self.faults.count
        if not isinstance(value, dict):
            self.faults.add("invalid_row", f"a row is an object with {SHAPES}, not {kind(value)}")
            return None
        if len(value) > MAX_COLUMNS:
            self.faults.add("invalid_row", TOO_MANY_COLUMNS)
            return None
        named = self._renamed(value) if self.columns else value
        row_format = self._settle(named)
        row = None if row_format is None else read(named, row_format, self.faults)
        if row is None or row_format is None or self.faults.count > before:
            return None
        self._tell_ignored(value, row_format)
        self.rows += 1
        if isinstance(row, Labelled):
            self.labels.add(row.label)
        return row

    def good(self, rows: int, labels: frozenset[bool]) -> None:
        """Rows that somebody else has checked, of the format that is settled."""
        self.rows += rows
        self.labels |= labels

    def settle_on(self, row_format: RowFormat, number: int) -> None:
        """Go on in a file whose first rows were read before."""
        if self.format is None:
            self.format, self._settled_at = row_format, number

    def _tell_ignored(self, value: dict[str, Any], row_format: RowFormat) -> None:
        """Columns of the row that are not read; rows mostly have the same ones."""
        keys = value.keys()
        if keys == self._seen:
            return
        self._seen = keys
        known = READ[row_format]
        for key in keys:
            if key in self._theirs or (key not in self.columns and (known is None or key in known)):
                continue
            self.faults.ignore(key, is_text=isinstance(value[key], str))

    def _renamed(self, value: dict[str, Any]) -> dict[str, Any]:
        """Mapped columns by our names; others by their own, less those that a mapped one takes the name of."""
        named = {key: item for key, item in value.items() if key not in self._theirs and key not in self.columns}
        for ours, theirs in self.columns.items():
            if theirs in value:
                named[ours] = value[theirs]
        return named

    def _settle(self, value: dict[str, Any]) -> RowFormat | None:
        """The format of this row, if it is the file's."""
        if self.columns and self._unmapped(value):
            return None
        if self._declared is not None:
            lacking = missing(value, self._declared)
            if lacking is None:
                return self._declared
            self.faults.add("missing_field", f"a row of format `{self._declared}` needs `{lacking}`", lacking)
            return None
        found = fits(value)
        if len(found) > 1:
            names = " and ".join(f"`{name}`" for name in found)
            self.faults.add(
                "ambiguous_row",
                f"the row fits the formats {names}; name one of them as `format` (with the upload, or in the job)",
            )
            return None
        if not found:
            self._unknown(value)
            return None
        if self.format is None:
            self.format, self._settled_at = found[0], self.faults.number
        elif found[0] != self.format:
            self.faults.add(
                "mixed_formats",
                f"the row is `{found[0]}`, but the file is `{self.format}` since {self.faults.unit} "
                f"{self._settled_at}; one format a file",
            )
            return None
        return found[0]

    def _unmapped(self, value: dict[str, Any]) -> bool:
        for ours, theirs in self.columns.items():
            if ours not in value and ours not in _OPTIONAL:
                words = f"`columns` says that `{ours}` is `{theirs}`, and the row has no `{theirs}`"
                self.faults.add("missing_field", words, ours)
                return True
        return False

    def _unknown(self, value: dict[str, Any]) -> None:
        if (near := nearest(value)) is not None:
            name, lacking = near
            self.faults.add("missing_field", f"a row of format `{name}` needs `{lacking}`", lacking)
            return
        found = ", ".join(f"`{str(key)[:40]}`" for key in list(value)[:8]) or "nothing"
        way_out = proposed([str(key) for key in value] or ["question"])
        words = f"a row has {SHAPES}; found {found}: map them, such as {way_out}"
        self.faults.add("unknown_format", words)
