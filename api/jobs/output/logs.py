"""A window on an attempt's log file, never the whole of it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from api.errors import Gone
from core.logfile import first_byte
from core.spec.run.folder import LOG_FILE
from core.storage.bucket import LOG
from core.storage.store import Folder, Store

MAX_BYTES = 1 << 20
"""Most bytes of one reply."""


@dataclass(frozen=True, slots=True)
class LogWindow:
    """`text` is what lies before byte `offset` of a file of `size` bytes."""

    text: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """`data` lies at `start` of a log of `size` bytes, of which the reader asked for what is from `asked` on."""

    data: bytes
    asked: int
    start: int
    size: int


def of_run(store: Store, run: str, *, offset: int | None = None, tail: int | None = None) -> LogWindow:
    """As `read`, of the run with this key. Raises Gone, StoreAway."""
    match store:
        case Folder():
            return read(store.root / run / LOG_FILE, offset=offset, tail=tail)
        case _:
            return _window(_of_parts(store, f"{run}/{LOG}", offset), offset, tail)


def read(path: Path, *, offset: int | None = None, tail: int | None = None) -> LogWindow:
    """From byte `offset` on, or the last `tail` lines, or (neither) the end; at most MAX_BYTES. No file: no text.

    Of a long log the oldest part is no longer kept (core/logfile.py): who asks for it is told, and goes on behind it.
    What is no UTF-8 is shown as U+FFFD. A character still being written at the end is left for the next window.
    """
    return _window(_of_file(path, offset), offset, tail)


def _window(piece: _Piece | None, offset: int | None, tail: int | None) -> LogWindow:
    if piece is None:
        return LogWindow("", 0, 0)
    data, start, size = piece.data, piece.start, piece.size
    if data.startswith(b"\0"):  # it went just now
        start += len(data) - len(data.lstrip(b"\0"))
        data = data.lstrip(b"\0")
    lost = start - piece.asked
    gone = f"[{lost} bytes of this log are no longer kept]\n" if lost > 0 and offset is not None else ""
    if offset is None:
        cut = _last_lines(data, tail) if tail is not None else 0
        if cut == 0 and start > 0:
            cut = data.find(b"\n") + 1  # begin with a whole line
            if tail is not None:  # fewer lines than were asked for: a line may be longer than a reply
                gone = f"[{start + cut} bytes before this are left out]\n"
        data = data[cut:]
    whole = data[: len(data) - _unfinished(data)]
    end = (size if offset is None else start + len(data)) - (len(data) - len(whole))
    return LogWindow(gone + whole.decode("utf-8", "replace"), end, size)


def _of_file(path: Path, offset: int | None) -> _Piece | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:  # a link, say
        raise Gone("the log on the data root is not a file that may be shown") from error
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):  # a pipe would keep its reader waiting
        os.close(descriptor)
        raise Gone("the log on the data root is not a file that may be shown")
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        asked = _asked(offset, size)
        start = max(asked, first_byte(file.fileno(), size))
        file.seek(start)
        return _Piece(file.read(min(MAX_BYTES, size - start)), asked, start, size)


def _of_parts(store: Store, prefix: str, offset: int | None) -> _Piece | None:
    """As a worker has stored it in an object store: parts that are called after the byte with which they begin."""
    parts = sorted((int(entry.key.rpartition("/")[2]), entry) for entry in store.tree(prefix))
    if not parts:
        return None
    size = parts[-1][0] + parts[-1][1].bytes
    asked = _asked(offset, size)
    start = max(asked, parts[0][0])
    data = b""
    for begins, entry in parts:
        skip = max(0, start - begins)
        length = min(entry.bytes - skip, MAX_BYTES - len(data))
        if length > 0:
            try:
                source = store.open(entry.key, size=None, start=skip, length=length)
            except FileNotFoundError:
                break  # removed meanwhile
            try:
                while piece := source.read(length):
                    data += piece
            finally:
                source.close()
    return _Piece(data, asked, start, size)


def _asked(offset: int | None, size: int) -> int:
    """Beyond its end: a file system without holes, where it began anew."""
    if offset is None:
        return max(0, size - MAX_BYTES)
    return offset if offset <= size else 0


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
