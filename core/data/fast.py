"""The usual JSON line, checked by the block: what has nothing unusual about it needs no second look.

One call into msgspec (https://jcristharif.com/msgspec) parses a block of whole lines against the types of the format.
It is as strict as our own reading about syntax, types and UTF-8, except for what is asked for here besides: that every
line is one row, that no key is doubled, and that there is something to learn. A block in which anything at all is
unusual (a key we do not expect, a fault, white space before a colon) is left to the exact reader, which then says what.

Why doubled keys cannot hide: each key of the text ends in a quote, perhaps white space, and a colon. There are at least
as many of those as there are keys with their doubles, so if they are as many as the distinct keys that were read, there
are no doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.data.formats.settle import KNOWN
from core.spec.axes.data import RowFormat

_NEWLINE, _OPEN, _CLOSE, _COLON, _QUOTE, _BACKSLASH, _SPACE, _TAB = b'\n{}:"\\ \t'


class _Turn(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: str
    content: str


_FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "input", "output"),
}
_Scalar = str | int | float | bool | None


def _row_type(row_format: RowFormat, columns: Mapping[str, str], first: Mapping[str, Any]) -> type | None:
    """The type of rows that are like the first one: its keys, neither more nor fewer. None for what is never usual."""
    ours = {theirs: name for name, theirs in columns.items()}
    fields: list[tuple[str, Any]] = []
    names: dict[str, str] = {}
    kind: Any
    for at, (key, value) in enumerate(first.items()):
        name = ours.get(key, "" if key in columns else key)  # a mapped column may take another's name
        if name == "messages" and row_format == "messages":
            field, kind = "messages", list[_Turn]
        elif name in _FIELDS[row_format]:
            field, kind = name, str
        elif name in KNOWN or isinstance(value, list | dict) or "\\" in key or '"' in key:
            return None
        else:
            field, kind = f"other_{at}", _Scalar
        fields.append((field, kind))
        names[field] = key
    return msgspec.defstruct("Usual", fields, rename=names, gc=False, forbid_unknown_fields=True)


class UsualLines:
    """For one file of a settled format whose first row is `first`."""

    def __init__(self, row_format: RowFormat, columns: Mapping[str, str], first: Mapping[str, Any]) -> None:
        self._format = row_format
        self._orders: dict[tuple[str, ...], bool] = {}
        """Roles of a chat, and whether they are in an order that makes sense."""
        kind = _row_type(row_format, columns, first) if row_format in _FIELDS else None
        self._decoder: msgspec.json.Decoder[Any] | None = None if kind is None else msgspec.json.Decoder(kind)
        self._row_keys = len(first)
        self._misses = 0

    def rows(self, block: bytes) -> int | None:
        """How many rows the block of whole lines has when nothing is wrong or unusual in it; else None."""
        if self._decoder is None or self._misses > 16:
            return None
        rows = self._rows(block)
        self._misses = self._misses + 1 if rows is None else 0
        return rows

    def _rows(self, block: bytes) -> int | None:
        assert self._decoder is not None
        if not block.startswith(b"{") or b"\r" in block:
            return None
        characters = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(characters == _NEWLINE)
        # Between two values of JSON Lines, and nowhere else, a line break has a brace on both sides.
        if (characters[ends - 1] != _CLOSE).any() or (characters[ends[:-1] + 1] != _OPEN).any():
            return None
        try:
            found: list[Any] = self._decoder.decode_lines(block)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if len(found) != len(ends):
            return None
        keys = self._keys(found)
        return len(found) if keys is not None and keys == _written_keys(block, characters) else None

    def _keys(self, rows: list[Any]) -> int | None:
        """Keys that the rows have together; None when one of them has nothing to learn."""
        match self._format:
            case "messages":
                return self._chat_keys(rows)
            case "text":
                filled = all([row.text.strip() and "\0" not in row.text for row in rows])  # noqa: C419 -- a list is faster
            case "prompt_completion":
                filled = all([row.completion.strip() and "\0" not in row.completion + row.prompt for row in rows])  # noqa: C419 -- a list is faster
            case "instruction":
                filled = all(row.instruction.strip() and row.output.strip() for row in rows)
                filled = filled and not any(
                    "\0" in row.instruction + getattr(row, "input", "") + row.output for row in rows
                )
            case _:
                return None
        return self._row_keys * len(rows) if filled else None

    def _chat_keys(self, rows: list[Any]) -> int | None:
        turns = 0
        orders = self._orders
        for row in rows:
            messages = row.messages
            roles = tuple([turn.role for turn in messages])
            good = orders.get(roles)
            if good is None:
                good = _in_order(roles)
                if len(orders) < 10_000:
                    orders[roles] = good
            if not good:
                return None
            for turn in messages:
                content = turn.content
                if "\0" in content or (not content.strip() and turn.role == "assistant"):
                    return None
            turns += len(messages)
        return self._row_keys * len(rows) + 2 * turns


def _written_keys(block: bytes, characters: NDArray[np.uint8]) -> int:
    """At least the number of keys in the text, with their doubles; just that where nothing is unusual."""
    colons = np.flatnonzero(characters == _COLON)
    before = characters[colons - 1]
    # An escaped quote before a colon is inside a string: no key that we take ends in a backslash.
    count = int(((before == _QUOTE) & (characters[colons - 2] != _BACKSLASH)).sum())
    for at in colons[(before == _SPACE) | (before == _TAB)]:
        start = at - 1
        while block[start] in b" \t":
            start -= 1
        count += block[start] == _QUOTE
    return count


def _in_order(roles: tuple[str, ...]) -> bool:
    """As core/data/formats/chat.py has it, for chats without tools: a system turn first, if any, the assistant last."""
    rest = roles[1:] if roles and roles[0] == "system" else roles
    return bool(rest) and rest[-1] == "assistant" and set(rest) <= {"user", "assistant"}
