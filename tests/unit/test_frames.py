"""Frames between a worker and the child of a session: whole ones arrive, anything else is an error and never hangs."""

from __future__ import annotations

import math
import random
import socket
import struct
import threading

import pytest

from core.spec.run import frames
from core.spec.run.frames import Frame, FrameError, pack, receive, send


def received(raw: bytes) -> Frame | None:
    """What is read where so many bytes came, and the other side has gone."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30.0)

    def write() -> None:
        with theirs:
            theirs.sendall(raw)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        return receive(ours)
    finally:
        ours.close()
        writer.join()


def test_a_frame_that_is_cut_short_anywhere_is_an_error() -> None:
    whole = pack(Frame({"id": 1}, b"body"))
    assert received(whole) == Frame({"id": 1}, b"body")
    assert received(b"") is None, "the end between two frames is none"
    for size in range(1, len(whole)):
        with pytest.raises(FrameError, match="ended within a frame"):
            received(whole[:size])


@pytest.mark.parametrize(
    ("header", "body"), [(frames.MOST_HEADER + 1, 0), (0, frames.MOST_BODY + 1), (2**32 - 1, 2**32 - 1)]
)
def test_sizes_beyond_the_limits_are_refused_before_anything_is_read(header: int, body: int) -> None:
    with pytest.raises(FrameError, match="announces"):
        received(struct.pack("!II", header, body))


@pytest.mark.parametrize("header", [b"", b"{", b"[1]", b"1", b"\xff\xfe", b"[" * 100_000])
def test_a_header_that_is_no_object_is_an_error(header: bytes) -> None:
    with pytest.raises(FrameError, match="header of a frame"):
        received(struct.pack("!II", len(header), 0) + header)


def test_noise_is_an_error_or_the_end() -> None:
    chance = random.Random(3)
    for _ in range(300):
        with pytest.raises(FrameError):
            received(chance.randbytes(chance.randrange(1, 64)))


def test_what_cannot_be_read_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for header in ({"x": "y" * frames.MOST_HEADER}, {"x": math.nan}, {"x": math.inf}):
            with pytest.raises(FrameError):
                send(ours, Frame(header))
        send(ours, Frame({"id": 2}))
        assert receive(theirs) == Frame({"id": 2}), "nothing of the others was sent"
