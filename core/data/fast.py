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
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from core.data.formats.judged import MOST_MARGIN
from core.data.formats.settle import KNOWN, READ
from core.spec.axes.data import RowFormat

_NEWLINE, _OPEN, _CLOSE, _COLON, _QUOTE, _BACKSLASH, _SPACE, _TAB = b'\n{}:"\\ \t'


class _Turn(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    role: str
    content: str


_ANSWER = _Turn("assistant", "…")
_TEXT, _TURNS = (str,), (str, list[_Turn])
_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "messages": {"messages": (list[_Turn],)},
    "text": {"text": _TEXT},
    "prompt_completion": {"prompt": _TEXT, "completion": _TEXT},
    "instruction": {"instruction": _TEXT, "input": _TEXT, "output": _TEXT},
    "preference": {"prompt": _TURNS, "chosen": _TURNS, "rejected": _TURNS, "margin": (float,)},
    "kto": {"prompt": _TURNS, "completion": _TURNS, "label": (bool,)},
    "stepwise": {"prompt": _TURNS, "completions": (list[str],), "labels": (list[bool],)},
}
"""Keys of each format, and the types that their values may have: the first row says which."""
_Scalar = str | int | float | bool | None


class Usual(NamedTuple):
    """A block with nothing unusual in it."""

    rows: int
    labels: frozenset[bool] = frozenset()
    """Labels of its KTO rows."""


def _row_type(row_format: RowFormat, columns: Mapping[str, str], first: Mapping[str, Any]) -> type | None:
    """The type of rows that are like the first one: its keys, neither more nor fewer. None for what is never usual."""
    ours = {theirs: name for name, theirs in columns.items()}
    fields: list[tuple[str, Any]] = []
    names: dict[str, str] = {}
    kind: Any
    for at, (key, value) in enumerate(first.items()):
        name = ours.get(key, "" if key in columns else key)  # a mapped column may take another's name
        if name in _FIELDS[row_format]:
            kinds = _FIELDS[row_format][name]
            field, kind = name, kinds[isinstance(value, list) and len(kinds) > 1]
        elif (
            name in KNOWN
            or name in (READ[row_format] or ())
            or isinstance(value, list | dict)
            or "\\" in key
            or '"' in key
        ):
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

    def rows(self, block: bytes) -> Usual | None:
        """What the block of whole lines has when nothing is wrong or unusual in it; else None."""
        if self._decoder is None or self._misses > 16:
            return None
        rows = self._rows(block)
        self._misses = self._misses + 1 if rows is None else 0
        return rows

    def _rows(self, block: bytes) -> Usual | None:
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
        if keys is None or keys != _written_keys(block, characters):
            return None
        labels = frozenset({row.label for row in found}) if self._format == "kto" else frozenset()
        return Usual(len(found), labels)

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
            case "preference":
                return self._judged_keys(rows, ("chosen", "rejected"))
            case "kto":
                return self._judged_keys(rows, ("completion",))
            case "stepwise":
                return self._stepwise_keys(rows)
            case _:
                return None
        return self._row_keys * len(rows) if filled else None

    def _chat_keys(self, rows: list[Any]) -> int | None:
        turns = 0
        for row in rows:
            if not self._is_chat(row.messages):
                return None
            turns += len(row.messages)
        return self._row_keys * len(rows) + 2 * turns

    def _is_chat(self, messages: list[_Turn]) -> bool:
        """The turns are in an order that makes sense, and each answer says something."""
        roles = tuple([turn.role for turn in messages])
        good = self._orders.get(roles)
        if good is None:
            good = _in_order(roles)
            if len(self._orders) < 10_000:
                self._orders[roles] = good
        if not good:
            return False
        for turn in messages:
            content = turn.content
            if "\0" in content or (not content.strip() and turn.role == "assistant"):
                return False
        return True

    def _judged_keys(self, rows: list[Any], answers: tuple[str, ...]) -> int | None:
        """A prompt with answers of its own kind: text, or messages with one turn an answer; or whole chats that have
        all turns in common but the last."""
        turns = 0
        for row in rows:
            found = [getattr(row, name) for name in answers]
            if len(found) == 2 and found[0] == found[1]:
                return None
            prompt = getattr(row, "prompt", None)
            margin = getattr(row, "margin", 0.0)
            if not abs(margin) <= MOST_MARGIN:
                return None
            if prompt is None:
                if len(found) != 2 or not all(isinstance(chat, list) and self._is_chat(chat) for chat in found):
                    return None
                chosen, rejected = found
                if len(chosen) < 2 or chosen[:-1] != rejected[:-1] or chosen[-2].role != "user":
                    return None
                turns += len(chosen) + len(rejected)
            elif isinstance(prompt, str):
                if not all(isinstance(part, str) and part.strip() and "\0" not in part for part in (prompt, *found)):
                    return None
            else:
                if not prompt or prompt[-1].role != "user":
                    return None
                for answer in found:
                    if not isinstance(answer, list) or len(answer) != 1 or not self._is_chat([*prompt, *answer]):
                        return None
                turns += len(prompt) + len(found)
        return self._row_keys * len(rows) + 2 * turns

    def _stepwise_keys(self, rows: list[Any]) -> int | None:
        turns = 0
        for row in rows:
            if len(row.completions) != len(row.labels) or not row.completions:
                return None
            if not all([step.strip() and "\0" not in step for step in row.completions]):  # noqa: C419 -- a list is faster
                return None
            if isinstance(row.prompt, str):
                if not row.prompt.strip() or "\0" in row.prompt:
                    return None
            else:
                if not row.prompt or row.prompt[-1].role != "user" or not self._is_chat([*row.prompt, _ANSWER]):
                    return None
                turns += len(row.prompt)
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
