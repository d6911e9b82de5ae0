"""A large JSON Lines file looked at by several processes: each glances at stretches of it, one reads what is unusual.

The glance (core/data/fast.py) needs no knowledge of what stands before, so it can be had in any order. The report is
made in the order of the file, by the one exact reader that also reads every block in which a glance found something: it
is the same report, to the letter, as that of one process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.data.fast import Usual, UsualLines
from core.spec.axes.data import RowFormat

WORTH_BYTES = 256 << 20
"""Below this one process is done before others have started."""
STRETCH_BYTES = 32 << 20
BLOCK_BYTES = 128 << 10
MOST_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines, and what a glance made of them; None: somebody has to read them."""

    start: int
    end: int
    usual: Usual | None


def processes() -> int:
    """How many may run at once on this machine, within reason."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def glance(
    path: Path, start: int, row_format: RowFormat, columns: Mapping[str, str], first: Mapping[str, Any]
) -> Iterator[LineBlock]:
    """Blocks of the file from the line that begins at `start`, in order, without a gap."""
    size = path.stat().st_size
    stretches = [(at, min(at + STRETCH_BYTES, size)) for at in range(start, size, STRETCH_BYTES)]
    spawn = multiprocessing.get_context("spawn")  # a forked child of a process with threads may hang
    with ProcessPoolExecutor(processes(), spawn) as pool:
        waiting = [
            pool.submit(_stretch, path, begin, end, begin == start, row_format, dict(columns), dict(first))
            for begin, end in stretches
        ]
        for done in waiting:
            yield from done.result()


def _stretch(
    path: Path,
    start: int,
    end: int,
    at_line: bool,
    row_format: RowFormat,
    columns: dict[str, str],
    first: dict[str, Any],
) -> list[LineBlock]:
    """The lines that begin in [start, end)."""
    usual = UsualLines(row_format, columns, first)
    blocks: list[LineBlock] = []
    with path.open("rb", buffering=0) as stream:
        if not at_line:
            start = _next_line(stream, start - 1)
        at = start
        while at < end:
            stream.seek(at)
            block = stream.read(BLOCK_BYTES)
            whole = block.rfind(b"\n") + 1
            if at + whole >= end:  # the last line that begins in here may end behind it
                whole = _next_line(stream, end - 1) - at
                if whole > len(block):
                    blocks.append(LineBlock(at, at + whole, None))
                    break
            elif not whole:
                line_end = _next_line(stream, at)
                blocks.append(LineBlock(at, line_end, None))
                at = line_end
                continue
            blocks.append(LineBlock(at, at + whole, usual.rows(block[:whole])))
            at += whole
    return blocks


def _next_line(stream: Any, at: int) -> int:
    """Where the line after the one that holds the byte `at` begins; the end of the file if there is none."""
    stream.seek(at)
    while chunk := stream.read(BLOCK_BYTES):
        found = chunk.find(b"\n")
        if found >= 0:
            return at + int(found) + 1
        at += len(chunk)
    return at
