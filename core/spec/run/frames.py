"""Frames between a worker and the child of a session: a JSON header and a body of bytes, each with its length in front.

Every size is bounded, and the end of a stream within a frame is an error, never a short frame.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

MOST_HEADER = 16 << 20
MOST_BODY = 1 << 30
_LENGTHS = struct.Struct("!II")


class FrameError(Exception):
    """What came is no frame; nothing more can be read from this stream."""


@dataclass(frozen=True, slots=True)
class Frame:
    header: dict[str, Any]
    body: bytes = b""


def pack(frame: Frame) -> bytes:
    """Make bytes of a frame. FrameError for one that could not be read: too large, or with NaN in its header."""
    try:
        header = json.dumps(frame.header, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise FrameError(f"the header of a frame is not JSON: {error}") from error
    if len(header) > MOST_HEADER or len(frame.body) > MOST_BODY:
        raise FrameError(
            f"a frame may have a header of {MOST_HEADER} bytes and a body of {MOST_BODY}; this one has {len(header)} "
            f"and {len(frame.body)}"
        )
    return _LENGTHS.pack(len(header), len(frame.body)) + header + frame.body


def unpack(data: bytes) -> Frame:
    """The frame that `pack` made bytes of."""
    header, _ = _LENGTHS.unpack_from(data)
    at = _LENGTHS.size + header
    return Frame(json.loads(data[_LENGTHS.size : at]), data[at:])


def send(stream: socket.socket, frame: Frame) -> None:
    """Send a frame whole. OSError when the other side is gone."""
    stream.sendall(pack(frame))


def receive(stream: socket.socket) -> Frame | None:
    """Wait for the next frame; None where the other side has closed the stream between two frames. FrameError for
    anything that is not one."""
    head = _read(stream, _LENGTHS.size, may_end=True)
    if head is None:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack(head)
    if header_bytes > MOST_HEADER or body_bytes > MOST_BODY:
        raise FrameError(f"a frame announces a header of {header_bytes} bytes and a body of {body_bytes}")
    raw = _read(stream, header_bytes)
    assert raw is not None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header of a frame is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("the header of a frame is not a JSON object")
    body = _read(stream, body_bytes)
    assert body is not None
    return Frame(header, bytes(body))


def _read(stream: socket.socket, count: int, *, may_end: bool = False) -> bytearray | None:
    """Read exactly so many bytes; None: the stream ended before the first, and it may."""
    found = bytearray(count)
    view, at = memoryview(found), 0
    while at < count:
        got = stream.recv_into(view[at:])
        if not got:
            if at == 0 and may_end:
                return None
            raise FrameError(f"the stream ended within a frame, after {at} of {count} bytes")
        at += got
    return found
