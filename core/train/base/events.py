"""What a child tells the worker: one JSON object a line in events.jsonl, in the shape core/spec/run/events.py
fixes."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

from core.spec.run.events import EventType
from core.train.base.log_lines import LogLines

ALIVE_SECONDS = 20.0
"""Silence after which `alive` writes a line; well below any bound on a hang."""
TAIL_BYTES = 65536
"""How much of an existing file is read at first to find its last line."""


class EventWriter:
    """Appends events to `path`; safe to call from several threads, one writer process a file.

    Every line is one `write(2)` on an O_APPEND descriptor, so a reader sees whole lines even when the child is
    killed. `seq` starts at 1 and goes on over an existing file; half a line left there (by a full disk) is cut off.
    Non-finite numbers become null, since JSON has no word for them.
    """

    def __init__(self, path: Path, log: LogLines | None = None) -> None:
        """`log`: told of every event too, for people."""
        self.path = path
        self._log = log
        self.phase = ""
        """The one told last."""
        self._told = time.monotonic()
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size, self._seq = _last_line(self._fd)
        if self._size < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, self._size)

    def write(self, type: EventType, /, **payload: Any) -> int:
        """Append one event and return its `seq`. OSError when the disk refuses: then nothing of the line stays."""
        with self._lock:
            seq = self._seq + 1
            event = {"seq": seq, "time": time.time(), "type": type} | _finite(payload)
            line = json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            try:
                written = os.write(self._fd, line)
                if written != len(line):
                    raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes could be written", str(self.path))
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._seq = seq
            self._size += len(line)
            self._told = time.monotonic()
            if type == "phase":
                self.phase = payload["phase"]
            if self._log is not None:
                self._log.tell(type, payload)
            return seq

    def alive(self) -> None:
        """Call it often from long work: the worker takes silence for a hang."""
        if time.monotonic() - self._told >= ALIVE_SECONDS:
            self.write("alive")

    def close(self) -> None:
        """Further writes are errors. A child that just ends need not call it."""
        with self._lock:
            os.close(self._fd)
            self._fd = -1


class NullEventWriter(EventWriter):
    """The event writer of every rank but the first. It writes nothing: rank 0 reports for all."""

    def __init__(self) -> None:
        self.phase = ""

    def write(self, type: EventType, /, **payload: Any) -> int:
        if type == "phase":
            self.phase = payload["phase"]
        return 0

    def alive(self) -> None:
        pass

    def close(self) -> None:
        pass


def _last_line(fd: int) -> tuple[int, int]:
    """(bytes up to and including the last newline, `seq` of the line it ends); (0, 0) for an empty file."""
    size = os.fstat(fd).st_size
    window = TAIL_BYTES
    while True:
        start = max(0, size - window)
        tail = os.pread(fd, size - start, start)
        end = tail.rfind(b"\n")
        begin = tail.rfind(b"\n", 0, max(end, 0)) + 1
        if start == 0 or (end >= 0 and begin > 0):
            break
        window *= 4
    if end < 0:
        return 0, 0
    return start + end + 1, int(json.loads(tail[begin:end])["seq"])


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
