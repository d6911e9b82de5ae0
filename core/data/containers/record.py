"""What the readers of text files have in common: they take bytes cut anywhere and hand out records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from core.data.decode import decode
from core.data.faults import MAX_COLUMNS, MAX_ROW_BYTES, TOO_MANY_COLUMNS, Faults

Container = Literal["jsonl", "json", "csv", "parquet"]


@dataclass(slots=True)
class Record:
    """One row's bytes and its place, or what is wrong at that place."""

    number: int
    """Its line, or its number among the rows."""
    raw: bytes
    end: int
    """Offset in the file behind it: where reading goes on after it."""
    fault: tuple[str, str] | None = None
    """(code, message) of a record that is none."""


class Splitter(Protocol):
    """Cuts a file into records. Starts at the file's beginning, or where an earlier one stopped."""

    number: int
    """Number of the last record (line or row)."""
    finished: bool
    """Nothing behind this is read any more (a fault that leaves no way on)."""

    def feed(self, chunk: bytes) -> Iterator[Record]: ...

    def finish(self) -> Iterator[Record]: ...

    def decode(self, record: Record, faults: Faults) -> Any:
        """The record's value; None, with the fault added, when it has none."""
        ...


TOO_LONG = ("too_long", f"a row has at most {MAX_ROW_BYTES >> 20} MiB")


def wrong_columns(names: Sequence[str]) -> str | None:
    """What is wrong with the names of a table's columns, in words."""
    if len(names) > MAX_COLUMNS:
        return TOO_MANY_COLUMNS
    double, times = Counter(names).most_common(1)[0] if names else ("", 1)
    if times == 1:
        return None
    return f"the column {double[:40]!r} stands twice" if double else "a column has no name"


def decode_json(raw: bytes, faults: Faults) -> Any:
    """The value of one JSON text."""
    try:
        return decode(raw.decode())
    except UnicodeDecodeError as error:
        faults.add("invalid_utf8", f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
    except ValueError as error:
        # JSONDecodeError has a place; ours says which key.
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        faults.add("invalid_json", f"not valid JSON: {at}")
    except RecursionError as error:
        faults.add("invalid_json", f"not valid JSON: {error}")
    return None
