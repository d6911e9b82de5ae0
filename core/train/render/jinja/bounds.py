"""What a chat template may use, and how large a result would be, said before it is made.

Filters and methods are allow-lists: what is not named here does not exist for a template. Of each one that makes more
than it is given, the size of the result is counted from the sizes of its arguments, multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateError

MAX_CHARACTERS = 32 << 20
"""Most characters of a text: twice those of the largest possible row."""
MAX_ITEMS = 300_000
"""Most items of a list, those of nested lists included."""
MAX_DEPTH = 64
MAX_NUMBER = 100_000
"""Largest number given to a filter or method as a width or a count."""
MAX_WRITTEN = 4 * MAX_CHARACTERS
"""Characters of a value as JSON or as Python writes it, at worst, every one of them escaped."""
MAX_HEAVY = 1 << 20
"""Characters that a filter may take that goes through a text word by word."""
MAX_FORM = 200
"""Most characters of a format of `strftime_now`."""


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


FILTERS = _names(
    "abs attr batch capitalize count d default dictsort e escape first float groupby indent int items join last length",
    "list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title",
    "tojson trim truncate unique upper urlencode",
)
METHODS: dict[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit",
        "isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition",
        "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith",
        "strip swapcase title upper zfill",
    ),
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
    set: _names("copy isdisjoint issubset issuperset"),
    bytes: frozenset(),
    bytearray: frozenset(),
    int: frozenset(),
    float: frozenset(),
    complex: frozenset(),
    type: frozenset(),
}
"""Methods that a template may call, by the type of the value. A type itself (`dict`) has none."""

_GROWS = {"upper": 3, "lower": 3, "capitalize": 3, "title": 3, "swapcase": 3, "casefold": 3}
"""A letter may have three in another case."""
_LINE_ENDS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_WORDS = re.compile(r"\S+")
_DIRECTIVE = re.compile(r"%-?[A-Za-z%]")


class TooMuch(TemplateError):
    """The template takes more time or memory than any chat needs."""


def may_use(value: Any, attribute: str) -> bool:
    """Whether a template may take this attribute of a value."""
    for kind, names in METHODS.items():
        if isinstance(value, kind):
            return attribute in names
    return True


def at_most(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise TooMuch(f"{what} grows without bound")


def check_numbers(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > MAX_NUMBER:
            raise TooMuch(f"`{name}` is called with a number beyond {MAX_NUMBER}")


def measured(value: Any) -> tuple[int, int]:
    """(items, characters) of it with all that is in it. Shared parts count as often as they would be written."""
    items, characters, waiting = 0, 0, [(value, 0)]
    while waiting:
        part, depth = waiting.pop()
        items += 1
        if isinstance(part, str):
            characters += len(part)
        elif isinstance(part, (list, tuple, set)):
            waiting.extend((inner, depth + 1) for inner in part)
        elif isinstance(part, dict):
            waiting.extend((inner, depth + 1) for pair in part.items() for inner in pair)
        elif isinstance(part, range):
            items += len(part)
        elif isinstance(part, int):  # of a row, perhaps: an id may have any number of digits
            characters += part.bit_length() // 3
        if items + len(waiting) > MAX_ITEMS or characters > MAX_CHARACTERS or depth > MAX_DEPTH:
            raise TooMuch("a list of it grows without bound")
    return items, characters


# --- filters and methods -----------------------------------------------------------------------------------


def check_method(text: str, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before a method of a text is called."""
    check_numbers(name, [*args, *named.values()])
    match name:
        case "replace" if len(args) >= 2:
            _replaced(text, str(args[0]), str(args[1]), args[2] if len(args) > 2 else -1)
        case "join" if args:
            joined(text, args[0])
        case "expandtabs":
            width = args[0] if args else named.get("tabsize", 8)
            at_most(
                len(text) + text.count("\t") * (width if isinstance(width, int) else 0), MAX_CHARACTERS, "`expandtabs`"
            )
        case "split" | "rsplit":
            _pieces(
                text, args[0] if args else named.get("sep"), args[1] if len(args) > 1 else named.get("maxsplit", -1)
            )
        case "splitlines":
            _counted(_LINE_ENDS, text)
        case _ if name in _GROWS:
            at_most(len(text) * _GROWS[name], 2 * MAX_CHARACTERS, f"`{name}`")


def check_filter(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before a filter is called; `args` with the value that is filtered, and without what Jinja passes besides."""
    check_numbers(name, [*args[1:], *named.values()])
    value = args[0] if args else None
    given = _by_name(name, args[1:], named)
    match name:
        case "replace" if "old" in given and "new" in given:
            count = given.get("count")
            _replaced(str(value), str(given["old"]), str(given["new"]), -1 if count is None else count)
        case "join":
            joined(str(given.get("d", "")), value)
        case "indent" if isinstance(value, str):
            width = given.get("width", 4)
            lines = _counted(_LINE_ENDS, value) + 1
            at_most(
                len(value) + lines * (len(width) if isinstance(width, str) else int(width)), MAX_CHARACTERS, "`indent`"
            )
        case "sum" if not isinstance(given.get("start", 0), int | float):
            raise TooMuch("`sum` adds numbers")
        case "truncate" | "title" | "e" | "escape" | "urlencode" | "groupby" | "int" | "float":
            if isinstance(value, str):
                at_most(len(value), MAX_HEAVY, f"what `{name}` makes")
            elif isinstance(value, dict | list | tuple):
                at_most(measured(value)[1], MAX_HEAVY, f"what `{name}` makes")
        case "upper" | "lower" | "capitalize" if isinstance(value, str):
            at_most(len(value) * _GROWS[name], 2 * MAX_CHARACTERS, f"`{name}`")
        case "string" if not isinstance(value, str):
            written(value)
        case (
            "list" | "sort" | "unique" | "map" | "select" | "reject" | "batch" | "slice" | "max" | "min" | "selectattr"
        ):
            if isinstance(value, str):
                at_most(len(value), MAX_ITEMS, f"the list that `{name}` makes")


_PARAMETERS = {
    "replace": ("old", "new", "count"),
    "join": ("d", "attribute"),
    "indent": ("width", "first", "blank"),
    "sum": ("attribute", "start"),
}


def _by_name(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_PARAMETERS.get(name, ()), args, strict=False)) | named


def _replaced(text: str, old: str, new: str, count: Any) -> None:
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    at_most(len(text) + times * len(new), MAX_CHARACTERS, "what `replace` makes")


def joined(between: str, values: Any) -> None:
    """Before values are joined. What has no length was made a list before (`Sandbox`)."""
    match values:
        case str():
            at_most(len(values), MAX_ITEMS, "what `join` takes")
            at_most(len(values) * (len(between) + 1), MAX_CHARACTERS, "what `join` makes")
        case _ if hasattr(values, "__len__"):
            items = (
                list(values.items() if isinstance(values, dict) else values) if not isinstance(values, list) else values
            )
            count, characters = measured(items)
            at_most(len(values) * len(between) + characters + 8 * count, 2 * MAX_CHARACTERS, "what `join` makes")


def _pieces(text: str, separator: Any, most: Any) -> None:
    if isinstance(most, int) and 0 <= most <= MAX_ITEMS:
        return
    if isinstance(separator, str) and separator:
        at_most(text.count(separator), MAX_ITEMS, "the list that `split` makes")
    elif len(text) > MAX_ITEMS:
        _counted(_WORDS, text)


def _counted(pattern: re.Pattern[str], text: str) -> int:
    """How often it is in the text; refused beyond a list's length."""
    count = 0
    for count, _ in enumerate(pattern.finditer(text), 1):
        at_most(count, MAX_ITEMS, "a list of lines or words")
    return count


def written(value: Any) -> None:
    """Before a list or an object becomes a text: every character of it may be written as an escape."""
    items, characters = measured(value)
    at_most(10 * characters + 24 * items, MAX_WRITTEN, "what it writes")


def check_json(value: Any, *, ensure_ascii: Any, indent: Any, separators: Any) -> None:
    """Before `tojson`."""
    items, characters = measured(value)
    between = [indent if isinstance(indent, str) else ""]
    between += [part for part in separators if isinstance(part, str)] if isinstance(separators, list | tuple) else []
    wide = sum(map(len, between)) + (abs(indent) if isinstance(indent, int) else 0)
    at_most(wide, MAX_NUMBER, "what `tojson` makes")
    each = 24 + (0 if indent is None and separators is None else MAX_DEPTH * wide if items > 1 else wide)
    if each * items > MAX_CHARACTERS:  # less, where it is not as deep as it may be
        each = 24 + wide * (1 + _depth(value))
    at_most(each * items, MAX_CHARACTERS, "what `tojson` makes")
    at_most(characters * (12 if ensure_ascii else 6), MAX_WRITTEN + MAX_CHARACTERS * 2, "what `tojson` makes")


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        parts = [part for part in level if isinstance(part, dict | list | tuple)]
        level = [item for part in parts for item in (part.values() if isinstance(part, dict) else part)]
        depth += bool(parts)
    return depth


def check_date_form(form: Any) -> None:
    """Before `strftime_now`: directives of one letter, which have no widths."""
    if not isinstance(form, str) or len(form) > MAX_FORM or "%" in _DIRECTIVE.sub("", form):
        raise TooMuch(f"`strftime_now` takes directives such as %d %b %Y, in at most {MAX_FORM} characters")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Before an operator of two values."""
    match operator:
        case "*" if isinstance(left, (str, list, tuple)) or isinstance(right, (str, list, tuple)):
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            limit = MAX_CHARACTERS if isinstance(repeated, str) else MAX_ITEMS
            if isinstance(times, int) and hasattr(repeated, "__len__"):
                at_most(times * len(repeated), limit, "what `*` makes")
        case "*" if isinstance(left, int) and isinstance(right, int):
            at_most(max(abs(left), abs(right)), 1 << 64, "what `*` makes")
        case "**" if not (
            isinstance(right, int | float)
            and isinstance(left, int | float)
            and abs(right) <= 64
            and abs(left) <= 1 << 32
        ):
            raise TooMuch("`**` makes a number that grows without bound")
        case "%" if isinstance(left, str):
            raise TooMuch("`%` may fill any amount of memory; put texts together with `~`")
        case "+" if isinstance(left, str) and isinstance(right, str):
            at_most(len(left) + len(right), MAX_CHARACTERS, "what `+` makes")
        case "+" if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            at_most(len(left) + len(right), MAX_ITEMS, "what `+` makes")
