"""From rows to tokens: here, or in several processes when there are many rows."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np

from core.data.rows import Numbered
from core.train.data.dataset import TokenDataset
from core.train.data.truncate import DataReport, Truncation, truncate
from core.train.lifeline import PR_SET_PDEATHSIG
from core.train.render.options import RenderOptions
from core.train.render.renderer import Rendered, Renderer

CHUNK = 64
"""Rows of one call into the tokenizer."""
PARALLEL_ROWS = 30_000
"""Rows from which on processes of their own pay: each takes some seconds of processor time to start."""
PARALLEL_CHUNK = 512


class TokenWriter:
    """Collects rendered rows in memory."""

    def __init__(self) -> None:
        self._ids, self._learned = array("i"), bytearray()
        self._ends, self._lines = array("q"), array("q")
        self.cut_prompts = 0

    def add(self, line: int, rendered: Rendered) -> None:
        if not rendered.ids:
            return
        self._ids.extend(rendered.ids)
        self._learned.extend(rendered.learned)
        self._ends.append(len(self._ids))
        self._lines.append(line)
        self.cut_prompts += rendered.cut_prompt

    def extend(self, part: _Part) -> None:
        """Rows that another process has rendered."""
        before = len(self._ids)
        self._ids.frombytes(part.ids)
        self._learned += part.learned
        self._ends.extend(before + end for end in part.ends)
        self._lines.extend(part.lines)
        self.cut_prompts += part.cut_prompts

    def part(self) -> _Part:
        return _Part(self._ids.tobytes(), bytes(self._learned), list(self._ends), list(self._lines), self.cut_prompts)

    def dataset(self) -> TokenDataset:
        ends = np.frombuffer(self._ends, dtype=np.int64)
        return TokenDataset(
            np.frombuffer(self._ids, dtype=np.int32),
            np.frombuffer(self._learned, dtype=np.bool_),
            np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1],
            ends,
            np.frombuffer(self._lines, dtype=np.int64),
        )


class _Part:
    """Some rows' tokens, on their way between processes."""

    __slots__ = ("cut_prompts", "ends", "ids", "learned", "lines")

    def __init__(self, ids: bytes, learned: bytes, ends: list[int], lines: list[int], cut_prompts: int) -> None:
        self.ids, self.learned, self.ends, self.lines, self.cut_prompts = ids, learned, ends, lines, cut_prompts


def tokenise(
    rows: Iterable[Numbered],
    renderer: Renderer,
    max_length: int,
    between: Callable[[], None] = lambda: None,
    *,
    truncation: Truncation = "cut_right",
) -> tuple[TokenDataset, DataReport]:
    """Render and truncate. DataError when no row has anything to learn. `between` runs before each row."""
    whole, cut_prompts = render_rows(rows, renderer, between)
    dataset, report = truncate(whole, max_length, truncation)
    report.cut_prompts = cut_prompts
    return dataset, report


def render_rows(
    rows: Iterable[Numbered], renderer: Renderer, between: Callable[[], None] = lambda: None
) -> tuple[TokenDataset, int]:
    """All rows as tokens in this process, and how many prompts were cut. DataError when a row cannot be rendered."""
    writer = TokenWriter()
    for chunk in chunks(rows, CHUNK):
        for _ in chunk:
            between()
        _render(chunk, renderer, writer)
    return writer.dataset(), writer.cut_prompts


def render_rows_in_parallel(
    rows: Sequence[Numbered],
    options: RenderOptions,
    model_dir: Path,
    processes: int,
    between: Callable[[int], None],
) -> tuple[TokenDataset, int]:
    """The same tokens in the same order from several processes. `between` gets the number of rows done."""
    writer = TokenWriter()
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),  # torch's threads do not survive a fork
        initializer=_begin,
        initargs=(os.getpid(), options, model_dir),
    )
    done = 0
    try:
        waiting: deque[tuple[int, Future[_Part]]] = deque()
        for chunk in chunks(rows, PARALLEL_CHUNK):
            waiting.append((len(chunk), pool.submit(_work, chunk)))
            if len(waiting) > 2 * processes:
                done += _take(waiting, writer, done, between)
        while waiting:
            done += _take(waiting, writer, done, between)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return writer.dataset(), writer.cut_prompts


def processes_for(rows: int) -> int:
    """How many processes so many rows are worth; 1: this one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else (os.cpu_count() or 1)
    return min(cores, 16) if rows >= PARALLEL_ROWS else 1


def chunks(rows: Iterable[Numbered], size: int) -> Iterator[list[Numbered]]:
    source = iter(rows)
    while chunk := list(itertools.islice(source, size)):
        yield chunk


def _render(chunk: Sequence[Numbered], renderer: Renderer, writer: TokenWriter) -> None:
    rendered = renderer.render_many([(numbered.row, numbered.line) for numbered in chunk])
    for numbered, row in zip(chunk, rendered, strict=True):
        writer.add(numbered.line, row)


def _take(
    waiting: deque[tuple[int, Future[_Part]]], writer: TokenWriter, done: int, between: Callable[[int], None]
) -> int:
    rows, future = waiting.popleft()
    while True:
        between(done)
        try:
            writer.extend(future.result(timeout=1.0))
        except TimeoutError:
            continue
        return rows


# --- in a process of its own -----------------------------------------------------------------------------

_renderer: Renderer | None = None


def _begin(parent: int, options: RenderOptions, model_dir: Path) -> None:
    global _renderer
    # Whoever ends the trainer means its helpers too; a request to stop is the trainer's to answer.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    from core.train.load import load_tokenizer

    _renderer = Renderer(load_tokenizer(model_dir), options)


def _work(chunk: list[Numbered]) -> _Part:
    assert _renderer is not None
    writer = TokenWriter()
    for part in chunks(chunk, CHUNK):
        _render(part, _renderer, writer)
    return writer.part()
