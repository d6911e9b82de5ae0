"""The rows of a run as a dataset of tokens: made here, or in several processes when there are many rows."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from core.data.rows import Numbered
from core.train.data.dataset import TokenDataset
from core.train.data.tokenise.chunks import TokenChunk, TokenWriter, chunks, render_rows
from core.train.data.tokenise.helpers import Helpers, rendered
from core.train.data.truncate import DataReport, Truncation, truncate
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer

PARALLEL_ROWS = 10_000
"""Rows from which on processes of their own pay: each takes a second of processor time to start."""
PARALLEL_CHUNK = 512


def dataset_of(writer: TokenWriter) -> TokenDataset:
    return TokenDataset(**writer.arrays())


def tokenise(
    rows: Iterable[Numbered],
    renderer: Renderer,
    max_length: int,
    between: Callable[[], None] = lambda: None,
    *,
    truncation: Truncation = "cut_right",
) -> tuple[TokenDataset, DataReport]:
    """Render and truncate. DataError when no row has anything to learn. `between` runs now and then."""
    writer = render_rows(rows, renderer, lambda _: between())
    dataset, report = truncate(dataset_of(writer), max_length, truncation)
    report.cut_prompts = writer.cut_prompts
    return dataset, report


def render_rows_in_parallel(
    rows: Iterable[Numbered],
    options: RenderOptions,
    model_dir: Path,
    processes: int,
    between: Callable[[int], None],
    *,
    listing: bool = False,
) -> TokenWriter:
    """The same tokens in the same order from several processes, while this one reads the rows. HelperKilled."""
    writer = TokenWriter()
    pool = Helpers(processes, options, model_dir)
    waiting: deque[Future[TokenChunk]] = deque()

    def take() -> None:
        writer.extend(pool.result(waiting.popleft(), lambda: between(writer.rows)))

    try:
        for chunk in chunks(rows, PARALLEL_CHUNK):
            waiting.append(pool.submit(rendered, chunk, listing))
            if len(waiting) > 2 * processes:
                take()
        while waiting:
            take()
    finally:
        pool.close()
    return writer


def processes_for(rows: int) -> int:
    """How many processes so many rows are worth; 1: this one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)
    return min(cores, 16) if rows >= PARALLEL_ROWS else 1
