"""Frames of JSON over a stream socket: four bytes of length, then the text."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

MOST = 64 << 20
"""Bytes of a frame at most."""
_HEAD = struct.Struct("<I")


class Closed(Exception):
    """The other side is gone."""


def send(to: socket.socket, value: Any) -> None:
    """Raises Closed, ValueError for a value that is too large."""
    data = json.dumps(value).encode()
    if len(data) > MOST:
        raise ValueError(f"{len(data)} bytes; the sandbox takes at most {MOST} at once")
    try:
        to.sendall(_HEAD.pack(len(data)) + data)
    except OSError as error:
        raise Closed from error


def receive(source: socket.socket) -> Any:
    """Raises Closed, TimeoutError."""
    size = _HEAD.unpack(_exactly(source, _HEAD.size))[0]
    if size > MOST:
        raise Closed
    return json.loads(_exactly(source, size))


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            part = source.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error
        if not part:
            raise Closed
        data += part
    return bytes(data)
