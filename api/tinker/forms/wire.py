"""Protocol buffers' wire format: what Tinker's messages need of it, without a library."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from core.errors import SpecError

Value = int | bytes


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Numbers and values of a message's fields, in their order. SpecError for what is not a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        match kind:
            case 1:
                size = 8
            case 5:
                size = 4
            case 2:
                size, at = _varint(data, at)
            case _:
                raise _broken(f"wire type {kind}")
        if not number or at + size > len(data):
            raise _broken("it is cut short")
        yield number, data[at : at + size]
        at += size


def sub(value: Value) -> bytes:
    """The bytes of a field that is a message, a text or bytes."""
    if not isinstance(value, bytes):
        raise _broken("a number stands in the place of a message")
    return value


def whole(value: Value) -> int:
    """A field that is a whole number of 32 or 64 bits."""
    if not isinstance(value, int):
        raise _broken("bytes stand in the place of a number")
    return value - (1 << 64) if value >> 63 else value


def text(value: Value) -> str:
    try:
        return sub(value).decode()
    except UnicodeDecodeError as error:
        raise _broken("a text is not UTF-8") from error


def double(value: Value) -> float:
    raw = sub(value)
    if len(raw) != 8:
        raise _broken("a double has 8 bytes")
    return float(struct.unpack("<d", raw)[0])


def integers(value: Value) -> list[int]:
    """A packed repeated field, or one of its values alone."""
    if isinstance(value, int):
        return [whole(value)]
    found, at = [], 0
    while at < len(value):
        one, at = _varint(value, at)
        found.append(whole(one))
    return found


def message(*parts: tuple[int, int | float | str | bytes]) -> bytes:
    """A message of its fields."""
    made = bytearray()
    for number, value in parts:
        match value:
            case int():
                made += _put(number << 3) + _put(value)
            case float():
                made += _put(number << 3 | 1) + struct.pack("<d", value)
            case str():
                raw = value.encode()
                made += _put(number << 3 | 2) + _put(len(raw)) + raw
            case bytes():
                made += _put(number << 3 | 2) + _put(len(value)) + value
    return bytes(made)


def packed(values: Iterable[int]) -> bytes:
    """A packed repeated field of whole numbers."""
    return b"".join(_put(value) for value in values)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise _broken("it is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise _broken("a number has more than 64 bits")


def _put(value: int) -> bytes:
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 127:
        made.append(value & 127 | 128)
        value >>= 7
    made.append(value)
    return bytes(made)


def _broken(why: str) -> SpecError:
    return SpecError(f"the body is not a message of protocol buffers: {why}", field="body", code="invalid_value")
