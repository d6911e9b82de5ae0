"""What is wrong with a data file, collected: every fault is counted, the first ones are kept with their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from core.errors import Fault

MAX_FAULTS = 50
MAX_ROW_BYTES = 16 << 20
"""A longer row is a fault: none of that size fits a context, and every file is read in bounded memory."""

MAX_COLUMNS = 4096
TOO_MANY_COLUMNS = f"a row has at most {MAX_COLUMNS} columns; leave out those that no format reads"

Unit = Literal["line", "row"]
"""How places are counted: lines of JSONL and CSV, rows of JSON and Parquet; both from 1."""


MAX_RANGES = 6
"""Runs of lines that are told of one cause; the others are counted."""


@dataclass(slots=True)
class _Cause:
    """One fault, and every place that has it."""

    code: str
    message: str
    where: str
    first: int
    ranges: list[list[int]]
    """[first, last] of the runs that are told."""
    count: int = 1

    def add(self, number: int) -> None:
        self.count += 1
        if number <= self.ranges[-1][1]:
            return
        if number == self.ranges[-1][1] + 1:
            self.ranges[-1][1] = number
        elif len(self.ranges) < MAX_RANGES:
            self.ranges.append([number, number])

    def place(self, unit: Unit) -> str:
        """`line 3`, `lines 1 to 60`, `lines 1, 5 to 7 and 12 more`."""
        if self.ranges[-1][1] == self.first:
            return f"{unit} {self.first}"
        told = sum(last - first + 1 for first, last in self.ranges)
        words = [f"{first}" if first == last else f"{first} to {last}" for first, last in self.ranges]
        if self.count > told:
            words.append(f"{self.count - told} more")
        return f"{unit}s {', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"{unit}s {words[0]}"


class Faults:
    """`number` is the line or row being read; `names` are the columns as the file calls them, so that a fault names
    what its reader can find. What is wrong in the same way in many rows is one fault, with all their places."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.unit: Unit = "line"
        self.number = 0
        self.count = 0
        self.ignored: dict[str, bool] = {}
        """Columns that the rows have and their format does not read, and whether they hold text."""
        self.fields: dict[str, None] = {}
        """Fields of chats that not every chat template has a place for."""
        self._causes: dict[tuple[str, str, str], _Cause] = {}
        self._of_the_file: list[Fault] = []
        self._names = names or {}
        self._notices: dict[str, tuple[str, int, int]] = {}

    def add(self, code: str, message: str, where: str = "", *, number: int | None = None) -> None:
        """`where` is a path inside the row such as `messages[0].role`, by our names."""
        self.count += 1
        at = number or self.number
        known = self._causes.get((code, message, where))
        if known is not None:
            known.add(at)
        elif len(self._causes) < MAX_FAULTS:
            self._causes[code, message, where] = _Cause(code, message, self.named(where), at, [[at, at]])

    def add_file(self, code: str, message: str) -> None:
        """A fault of the file as a whole."""
        self.count += 1
        if len(self._of_the_file) < MAX_FAULTS:
            self._of_the_file.append(Fault(code, message))

    @property
    def kept(self) -> list[Fault]:
        """The first MAX_FAULTS causes, in the order of the file."""
        found = list(self._of_the_file)
        for cause in self._causes.values():
            place = cause.place(self.unit)
            words = f"{place}: {cause.where}" if cause.where else place
            times = cause.count if cause.count > 1 else None
            found.append(Fault(cause.code, cause.message, words, line=cause.first, times=times))
        return found[:MAX_FAULTS]

    def ignore(self, column: str, *, is_text: bool) -> None:
        """A column that no row is trained on."""
        self.ignored.setdefault(column, is_text)

    def notice(self, code: str, message: str) -> None:
        """Not wrong, but to be known: told once, with how often and where first."""
        said, first, times = self._notices.get(code, (message, self.number, 0))
        self._notices[code] = (said, first, times + 1)

    def notices(self) -> tuple[Fault, ...]:
        return tuple(
            Fault(code, f"{message} ({times}x, first in {self.unit} {first})", f"{self.unit} {first}", line=first)
            for code, (message, first, times) in self._notices.items()
        )

    def named(self, where: str) -> str:
        """The path with its first part by the file's own name."""
        for ours, theirs in self._names.items():
            if where == ours or where.startswith((f"{ours}[", f"{ours}.")):
                return theirs + where[len(ours) :]
        return where


def kind(value: Any) -> str:
    """A JSON value's type in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return f"a {type(value).__name__}"


def text(value: Any, where: str, faults: Faults, *, filled: bool = False) -> str:
    """A string that can be trained on; an empty one in its place when it is none, with the fault added."""
    if not isinstance(value, str):
        faults.add("invalid_type", f"expected a string, not {kind(value)}", where)
        return ""
    if filled and not value.strip():
        words = "there must be something to learn here; found only white space" if value else "must not be empty"
        faults.add("empty", words, where)
    if "\0" in value:
        faults.add("nul_character", "holds a NUL character (\\u0000), which is in no text; remove it", where)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            words = "holds half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
            faults.add("invalid_unicode", words, where)
    return value


def optional_text(value: dict[str, Any], key: str, where: str, faults: Faults) -> str | None:
    """As `text`; None for a key that is absent or null."""
    return None if value.get(key) is None else text(value[key], where, faults)
