"""What the pages of a Parquet file will ask of memory, from their headers, before any of them is decoded.

The directory at a file's end says how large its columns are, and nobody holds its writer to that: pyarrow allocates
what each page's own header claims. So the headers are read here first, in the order and by the offsets that pyarrow
uses (https://parquet.apache.org/docs/file-format/data-pages/; Thrift's compact protocol,
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

HEADER_BYTES = (512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 17 << 20)
"""What is read for one header, and again if that was too little: statistics may hold long values. pyarrow ends at 16
MiB. Eight times as much each time, so that the work stays in proportion to the header."""
MAX_DEPTH = 16
DELTA_BYTE_ARRAY = 7
DELTA_ENCODINGS = (6, DELTA_BYTE_ARRAY)
"""DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY."""
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3


class BadPage(ValueError):
    """No page header stands where one must."""


@dataclass(frozen=True, slots=True)
class Page:
    dictionary: bool
    size: int
    """Bytes when decompressed."""
    values: int
    """Nulls included; of a nested column all of their levels."""
    encoding: int
    header: int
    """Bytes of its header."""


def pages(descriptor: int, start: int, length: int, values: int) -> Iterator[Page]:
    """Pages of one column chunk: `length` bytes from `start` on, until `values` were seen. Raises BadPage."""
    at, end, seen = start, start + length, 0
    while at < end and seen < values:
        header, size = _header(descriptor, at, end)
        kind, whole, packed = (_number(header, field) for field in (1, 2, 3))
        inner = header.get({_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}.get(kind, 0))
        count = encoding = 0
        if isinstance(inner, dict):
            count, encoding = _number(inner, 1), _number(inner, 4 if kind == _DATA_V2 else 2)
        yield Page(kind == _DICTIONARY, whole, count, encoding, size)
        seen += count if kind != _DICTIONARY else 0
        at += size + packed


def _number(fields: dict[int, Any], field: int) -> int:
    value = fields.get(field)
    if not isinstance(value, int) or value < 0:
        raise BadPage("a page's header lacks a number")
    return value


def _header(descriptor: int, at: int, end: int) -> tuple[dict[int, Any], int]:
    """The fields of a header by number, and its size."""
    for wanted in HEADER_BYTES:
        raw = os.pread(descriptor, min(wanted, end - at), at)
        reader = _Compact(raw)
        try:
            return reader.struct(), reader.at
        except IndexError:
            if len(raw) < wanted:
                break
    raise BadPage("a page's header has no end")


class _Compact:
    """Thrift's compact protocol, as far as page headers need it: numbers and structs are kept, all else is skipped.
    IndexError where the bytes end."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._number()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        """`depth`: of the structs and lists that it stands in."""
        if depth > MAX_DEPTH:
            raise BadPage("a page's header is nested too deeply")
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._number()
            case 7:
                return self._skip(8)
            case 8:
                return self._skip(self._varint())
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._varint()
                return self._elements(head & 15, count, depth + 1)
            case 12:
                return self.struct(depth + 1)
            case _:
                raise BadPage("a page's header is none")

    def _elements(self, kind: int, count: int, depth: int) -> None:
        for _ in range(count):
            if kind in (1, 2):
                self._byte()
            else:
                self._value(kind, depth)

    def _byte(self) -> int:
        value = self._raw[self.at]
        self.at += 1
        return value

    def _skip(self, count: int) -> None:
        if self.at + count > len(self._raw):
            raise IndexError
        self.at += count

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise BadPage("a page's header has a number without an end")
        return value | byte << shift

    def _number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
