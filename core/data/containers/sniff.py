"""What a file is, by its first bytes and never by its name."""

from __future__ import annotations

import csv
from collections.abc import Mapping

from core.data.containers.csv_file import parse
from core.data.containers.json_array import HEAD
from core.data.containers.jsonl import BOM
from core.data.containers.record import Container
from core.data.formats.settle import KNOWN

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


class NotRows(ValueError):
    """The file holds no rows that we read; `code` and the words are for a fault."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


def sniff(head: bytes, columns: Mapping[str, str]) -> Container:
    """`head`: the first HEAD_BYTES, or the whole file. Raises NotRows for a file that is something else.

    Text that is neither JSON nor begins with a header of known columns is taken for JSON Lines, whose reader names what
    is wrong with each line.
    """
    if head.startswith(b"PAR1"):
        return "parquet"
    for magic, what in _PACKED.items():
        if head.startswith(magic):
            raise NotRows("unreadable_file", f"the file is {what}; send JSONL, JSON, CSV or Parquet as it is")
    if head.startswith(_WIDE) or head[1:2] == b"\0" or (head[:1] == b"\0" and head[1:2] != b"\0"):
        raise NotRows("invalid_utf8", "the file looks like UTF-16; save it as UTF-8")
    text = head.removeprefix(BOM)
    if found := HEAD.match(text):
        if found.group(1) == b"[" or "data" not in columns.values():
            return "json"
        return "jsonl"
    if text.lstrip()[:1] == b"{":
        return "jsonl"
    names = _header(text)
    known = KNOWN | frozenset(columns.values())
    if known & set(names):
        return "csv"
    for mark, words in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and known & {name.strip('" ') for name in names[0].split(mark)} and mark in names[0]:
            raise NotRows("invalid_csv", f"the columns are separated by {words}; CSV has commas")
    return "jsonl"


def _header(text: bytes) -> list[str]:
    first = text.lstrip(b"\r\n").partition(b"\n")[0].rstrip(b"\r")
    try:
        return [name.strip() for name in parse(first)]
    except (ValueError, csv.Error):
        return []
