"""Blocks of streamed rows. A helper process imports this, and no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from core.data.rows import Numbered
from core.data.stream import Cursor, RowStream
from core.spec.axes.data import RowFormat
from core.spec.run.orders import DataOrder
from core.train.data.tokenise.chunks import TokenChunk, render_rows
from core.train.render.renderer import Renderer


@dataclass(frozen=True, slots=True)
class MadeBlock:
    """The tokens of a block, on their way between processes."""

    part: TokenChunk
    end: Cursor | None
    anew: bool
    """The stream had come to its end and begins anew with this block."""
    formats: set[RowFormat]
    """Formats of its rows."""


def make_block(
    data: DataOrder, start: Cursor | None, count: int, renderer: Renderer, between: Callable[[], None] = lambda: None
) -> MadeBlock:
    rows, end, formats = read_block(data, start, count, between)
    if anew := not rows:
        rows, end, formats = read_block(data, None, count, between)
    return MadeBlock(render_rows(rows, renderer, lambda _: between()).chunk(), end, anew, formats)


def read_block(
    data: DataOrder, start: Cursor | None, count: int, between: Callable[[], None]
) -> tuple[list[Numbered], Cursor | None, set[RowFormat]]:
    """So many rows from a cursor on, the cursor behind them, and their formats."""
    stream = RowStream(data)
    rows: list[Numbered] = []
    end = start
    for cursor, numbered in stream.rows(start):
        between()
        rows.append(numbered)
        end = cursor
        if len(rows) == count:
            break
    return rows, end, stream.formats()
