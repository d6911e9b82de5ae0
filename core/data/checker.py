"""From lines to rows, and every fault on the way: the API checks an upload with it while it streams, the trainer reads
with it.

A file has one format, settled by the keys of its rows:

    messages            {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    prompt_completion   {"prompt": "…", "completion": "…"}
    instruction         {"instruction": "…", "input": "…" (optional), "output": "…"}
    text                {"text": "…"}

Other keys beside these are ignored (an `id`, a `source`), unless they make the format ambiguous. Nothing is guessed:
a row that fits two formats, or another one than the rows before it, is a fault.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from core.data.rows import Chat, Instruction, Message, PromptCompletion, Row, RowFormat, Text
from core.errors import Fault

MAX_FAULTS = 50
MAX_LINE_BYTES = 16 << 20
"""A longer line is a fault: no row of that size fits a context, and an upload is checked in bounded memory."""

ROLES = ("system", "user", "assistant")
_REQUIRED: dict[RowFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
_UNREADABLE = ("tools", "functions")
"""Keys that would change what a chat template writes: ignoring them would train something else than was meant."""
_SHAPES = "`messages`, `prompt` and `completion`, `instruction` and `output`, or `text`"


@dataclass(frozen=True, slots=True)
class FileReport:
    """What a whole file turned out to be."""

    rows: int
    """Rows without a fault."""
    format: RowFormat | None
    """None when no row had a recognisable format."""
    faults: tuple[Fault, ...]
    """The first MAX_FAULTS of them, by line."""
    fault_count: int
    """All of them."""

    @property
    def ok(self) -> bool:
        return self.fault_count == 0


class RowChecker:
    """Feed it a file, by chunks (`feed`) or by lines (`feed_line`), then ask `finish`. Memory: one line.

    `declared` is the format the job names; `auto` lets the rows say. `feed` and `feed_line` hand back good rows.
    """

    def __init__(self, declared: RowFormat | Literal["auto"] = "auto") -> None:
        self._declared: RowFormat | None = None if declared == "auto" else declared
        self._format = self._declared
        self._settled_at = 0
        self._rows = 0
        self._faults: list[Fault] = []
        self._fault_count = 0
        self._blank_at: int | None = None
        self._line = 0
        self._rest = bytearray()
        self._skipping = False

    def feed(self, chunk: bytes) -> list[Row]:
        """Take the next bytes of the file, cut anywhere."""
        rows: list[Row] = []
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._append(chunk[start:end])
            rows.extend(self._end_of_line())
            start = end + 1
        self._append(chunk[start:])
        return rows

    def feed_line(self, line_no: int, raw: bytes) -> Row | None:
        """Take one line (numbered from 1, with or without its end). None when it is blank or has a fault."""
        self._line = line_no
        if len(raw) > MAX_LINE_BYTES:
            self._fault("too_long", f"a line has at most {MAX_LINE_BYTES >> 20} MiB")
            return None
        if not raw.strip():
            # Blank lines may end a file; between rows they hide a lost row.
            self._blank_at = self._blank_at or line_no
            return None
        if self._blank_at is not None:
            self._fault("blank_line", "an empty line between rows; remove it", line=self._blank_at)
            self._blank_at = None
        faults_before = self._fault_count
        row = self._row(raw)
        if row is None or self._fault_count > faults_before:
            return None
        self._rows += 1
        return row

    def finish(self) -> FileReport:
        """The report over all that was fed. A file without any row is a fault of its own."""
        if self._rest or self._skipping:
            self._end_of_line()
        if self._rows == 0 and self._fault_count == 0:
            self._fault_count = 1
            self._faults.append(Fault("empty_file", f"the file has no rows; each line is a JSON object with {_SHAPES}"))
        return FileReport(self._rows, self._format, tuple(self._faults), self._fault_count)

    @property
    def fault_count(self) -> int:
        """Faults so far: whoever streams need not go on for ever behind the first ones."""
        return self._fault_count

    # --- lines ---------------------------------------------------------------------------------------

    def _append(self, part: bytes) -> None:
        if not self._skipping:
            self._rest += part
            if len(self._rest) > MAX_LINE_BYTES + 1:  # a carriage return may be the last byte
                self._skipping = True
                self._rest.clear()

    def _end_of_line(self) -> Iterable[Row]:
        raw, skipped = bytes(self._rest), self._skipping
        self._rest.clear()
        self._skipping = False
        if skipped:
            self._line += 1
            self._fault("too_long", f"a line has at most {MAX_LINE_BYTES >> 20} MiB")
            return ()
        row = self.feed_line(self._line + 1, raw)
        return () if row is None else (row,)

    def _fault(self, code: str, message: str, where: str = "", line: int | None = None) -> None:
        self._fault_count += 1
        if len(self._faults) < MAX_FAULTS:
            place = f"line {line or self._line}"
            self._faults.append(Fault(code, message, f"{place}: {where}" if where else place))

    # --- one row -------------------------------------------------------------------------------------

    def _row(self, raw: bytes) -> Row | None:
        try:
            text = raw.decode("utf-8-sig" if self._line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            self._fault("invalid_utf8", f"byte {error.start + 1} is not UTF-8; save the file as UTF-8")
            return None
        try:
            value = json.loads(text, object_pairs_hook=_no_doubles, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            self._fault("invalid_json", f"not valid JSON: {error.msg} at column {error.colno}")
            return None
        except (ValueError, RecursionError) as error:
            self._fault("invalid_json", f"not valid JSON: {error}")
            return None
        if not isinstance(value, dict):
            self._fault("invalid_row", f"a row is an object with {_SHAPES}, not {_kind(value)}")
            return None
        row_format = self._settle(value)
        match row_format:
            case None:
                return None
            case "messages":
                return self._chat(value)
            case "prompt_completion":
                prompt, completion = self._string(value, "prompt"), self._string(value, "completion", filled=True)
                return PromptCompletion(prompt, completion)
            case "instruction":
                given = self._string(value, "input") if value.get("input") is not None else ""
                instruction = self._string(value, "instruction", filled=True)
                return Instruction(instruction, given, self._string(value, "output", filled=True))
            case "text":
                return Text(self._string(value, "text", filled=True))
            case _:
                raise AssertionError(f"no reader for {row_format}")

    def _settle(self, value: dict[str, Any]) -> RowFormat | None:
        """The format of this row, if it is the file's."""
        fits = [name for name, keys in _REQUIRED.items() if all(key in value for key in keys)]
        if self._declared is not None:
            if self._declared in fits:
                return self._declared
            missing = [key for key in _REQUIRED[self._declared] if key not in value]
            self._fault("missing_field", f"a row of format `{self._declared}` needs `{missing[0]}`", missing[0])
            return None
        if len(fits) > 1:
            names = " and ".join(f"`{name}`" for name in fits)
            self._fault(
                "ambiguous_row",
                f"the row fits the formats {names}; name one of them as `format` (with the upload, or in the job)",
            )
            return None
        if not fits:
            self._unknown(value)
            return None
        if self._format is None:
            self._format, self._settled_at = fits[0], self._line
        elif fits[0] != self._format:
            self._fault(
                "mixed_formats",
                f"the row is `{fits[0]}`, but the file is `{self._format}` since line {self._settled_at}; "
                "one format a file",
            )
            return None
        return fits[0]

    def _unknown(self, value: dict[str, Any]) -> None:
        for name, keys in _REQUIRED.items():
            missing = [key for key in keys if key not in value]
            if len(missing) < len(keys):
                self._fault("missing_field", f"a row of format `{name}` needs `{missing[0]}`", missing[0])
                return
        found = ", ".join(f"`{key[:40]}`" for key in list(value)[:8]) or "nothing"
        self._fault("unknown_format", f"a row has {_SHAPES}; found {found}")

    def _chat(self, value: dict[str, Any]) -> Row | None:
        for key in _UNREADABLE:
            if value.get(key):
                self._fault("unsupported_field", f"`{key}` would be lost: tool definitions are not supported", key)
        messages = value["messages"]
        if not isinstance(messages, list):
            self._fault("invalid_type", f"expected a list of messages, not {_kind(messages)}", "messages")
            return None
        if not messages:
            self._fault("empty", "a chat has at least one message", "messages")
            return None
        checked = tuple(self._message(item, f"messages[{index}]") for index, item in enumerate(messages))
        if messages[-1] != {} and isinstance(messages[-1], dict) and messages[-1].get("role") in ("system", "user"):
            self._fault(
                "no_answer",
                "the last message must be the assistant's: it is what is learned",
                f"messages[{len(messages) - 1}].role",
            )
        return Chat(checked)

    def _message(self, item: Any, where: str) -> Message:
        if not isinstance(item, dict):
            self._fault("invalid_type", f"a message is an object with `role` and `content`, not {_kind(item)}", where)
            return Message("", "")
        for key in item:
            if key not in ("role", "content"):
                self._fault(
                    "unsupported_field",
                    "a message has `role` and `content` only; this would be lost",
                    f"{where}.{key[:40]}",
                )
        role = item.get("role")
        if role not in ROLES:
            given = f"not {_kind(role)}" if not isinstance(role, str) else f"not {role[:40]!r}"
            self._fault("unknown_role", f"a role is `system`, `user` or `assistant`, {given}", f"{where}.role")
            role = ""
        if "content" not in item:
            self._fault("missing_field", "a message needs `content`", f"{where}.content")
            return Message(role, "")
        return Message(role, self._string(item, "content", where=f"{where}.content", filled=role == "assistant"))

    def _string(self, value: dict[str, Any], key: str, *, where: str | None = None, filled: bool = False) -> str:
        content, where = value[key], where or key
        if not isinstance(content, str):
            self._fault("invalid_type", f"expected a string, not {_kind(content)}", where)
            return ""
        if filled and not content.strip():
            self._fault(
                "empty",
                "there must be something to learn here; found only white space" if content else "must not be empty",
                where,
            )
        try:
            content.encode()
        except UnicodeEncodeError:
            self._fault(
                "invalid_unicode", "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character", where
            )
        return content


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        double = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {double[:40]!r} stands twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _kind(value: Any) -> str:
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
        case _:
            return "an object"
