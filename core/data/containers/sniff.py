"""What a file is, by its first bytes and never by its name."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping

from core.data.containers.csv_file import parse
from core.data.containers.json_array import HEAD
from core.data.containers.jsonl import BOM
from core.data.containers.record import Container
from core.data.formats.settle import KNOWN
from core.data.mapping import proposed

HEAD_BYTES = 64 << 10
"""As much of a file is looked at, if it has so much."""

_PACKED = {
    b"PK\x03\x04": "a ZIP archive (or a spreadsheet)",
    b"\x1f\x8b": "packed with gzip",
    b"BZh": "packed with bzip2",
    b"\xfd7zXZ": "packed with xz",
    b"(\xb5/\xfd": "packed with zstd",
    b"ARROW1": "an Arrow file",
}
_WIDE = (b"\xff\xfe", b"\xfe\xff")
_OBJECTS_BY_RETURNS = re.compile(rb"\}[ \t]*\r\s*\{")
_COLUMN = re.compile(r"[^\W\d][\w .-]{0,63}")
"""What the name of a column looks like; lines of prose with commas in them rarely do throughout."""


class NotRows(ValueError):
    """The file holds no rows that we read; `code` and the words are for a fault."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


def sniff(head: bytes, columns: Mapping[str, str]) -> Container:
    """`head`: the first HEAD_BYTES, or the whole file. Raises NotRows for a file that is something else.

    Text that is neither JSON nor begins with a header is taken for JSON Lines, whose reader names what is wrong with
    each line.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, what in _PACKED.items():
        if head.startswith(magic):
            raise NotRows("unreadable_file", f"the file is {what}; send JSONL, JSON, CSV or Parquet as it is")
    if head.startswith(_WIDE) or head[1:2] == b"\0" or (head[:1] == b"\0" and head[1:2] != b"\0"):
        raise NotRows("invalid_utf8", "the file looks like UTF-16; save it as UTF-8")
    text = head.removeprefix(BOM)
    known = KNOWN | frozenset(columns.values())
    first, by_returns, _ = text.partition(b"\r")
    if b"\n" not in text and by_returns and (_OBJECTS_BY_RETURNS.search(text) or known & set(_header(first))):
        raise NotRows("unreadable_file", "its lines end with carriage returns; end them with line feeds")
    if found := HEAD.match(text):
        if found.group(1) == b"[" or "data" not in columns.values():
            return "json"
        return "jsonl"
    if text.lstrip()[:1] == b"{":
        return "jsonl"
    names = _header(text)
    if known & set(names):
        return "csv"
    for mark, words in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and known & {name.strip('" ') for name in names[0].split(mark)} and mark in names[0]:
            raise NotRows("invalid_csv", f"the columns are separated by {words}; CSV has commas")
    if len(names) > 1 and all(map(_COLUMN.fullmatch, names)):
        shown = ", ".join(f"`{name}`" for name in names[:8])
        words = f"no column of the CSV file is one of a format; found {shown}"
        raise NotRows("unknown_format", f"{words}: map them, such as {proposed(names)}")
    return "jsonl"


def _header(text: bytes) -> list[str]:
    first = text.lstrip(b"\r\n").partition(b"\n")[0].rstrip(b"\r")
    try:
        return [name.strip() for name in parse(first)]
    except (ValueError, csv.Error):
        return []
