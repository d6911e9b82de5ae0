"""A window on an attempt's log file, never the whole of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from api.errors import Gone
from core.logfile import first_byte

MAX_BYTES = 1 << 20
"""Of one reply."""


@dataclass(frozen=True, slots=True)
class Window:
    """`text` is what lies before byte `offset` of a file of `size` bytes."""

    text: str
    offset: int
    size: int


def read(path: Path, *, offset: int | None = None, tail: int | None = None) -> Window:
    """From byte `offset` on, or the last `tail` lines, or (neither) the end; at most MAX_BYTES. No file: no text.

    Of a long log the oldest part is no longer kept (core/logfile.py): who asks for it is told, and goes on behind it.
    What is no UTF-8 is shown as U+FFFD. A character still being written at the end is left for the next window.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return Window("", 0, 0)
    except OSError as error:  # a link, say
        raise Gone("the log on the data root is not a file that may be shown") from error
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # Beyond its end: a file system without holes, where it began anew.
        asked = max(0, size - MAX_BYTES) if offset is None else offset if offset <= size else 0
        start = max(asked, first_byte(file.fileno(), size))
        file.seek(start)
        data = file.read(min(MAX_BYTES, size - start))
    if data.startswith(b"\0"):  # it went just now
        start += len(data) - len(data.lstrip(b"\0"))
        data = data.lstrip(b"\0")
    gone = f"[{start - asked} bytes of this log are no longer kept]\n" if start > asked and offset is not None else ""
    if offset is None:
        cut = _last_lines(data, tail) if tail is not None else 0
        if cut == 0 and start > 0:
            cut = data.find(b"\n") + 1  # begin with a whole line
        data = data[cut:]
    whole = data[: len(data) - _unfinished(data)]
    end = (size if offset is None else start + len(data)) - (len(data) - len(whole))
    return Window(gone + whole.decode("utf-8", "replace"), end, size)


def _last_lines(data: bytes, lines: int) -> int:
    """Where the last `lines` lines begin."""
    at = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1 if lines else len(data)


def _unfinished(data: bytes) -> int:
    """Length of an incomplete UTF-8 character at the very end."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        expected = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return back if expected > back else 0
    return 0
