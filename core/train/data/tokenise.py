"""From rows to tokens: here, or in several processes when there are many rows."""

from __future__ import annotations

import itertools
import os
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from core.data.rows import Labelled, Numbered, Preference, PromptOnly, Stepwise
from core.errors import EftError
from core.train.data import helpers
from core.train.data.dataset import TokenDataset
from core.train.data.helpers import Helpers
from core.train.data.truncate import DataReport, Truncation, truncate
from core.train.render.options import RenderOptions
from core.train.render.renderer import Renderer
from core.train.render.strings import Rendered

CHUNK = 64
"""Rows of one call into the tokenizer."""
PARALLEL_ROWS = 30_000
"""Rows from which on processes of their own pay: each takes some seconds of processor time to start."""
PARALLEL_CHUNK = 512
_APART = (Preference, Labelled, Stepwise, PromptOnly)
"""Rows that are rendered one by one."""


class RowFault(NamedTuple):
    """Why a row cannot be rendered."""

    line: int
    code: str
    message: str
    place: str
    """Path inside the row, such as `messages[1]`, or in the job; empty for the whole row."""

    @classmethod
    def of(cls, line: int, error: EftError) -> RowFault:
        """The fault that the renderer raised for the row of this line."""
        place = (error.field or "").removeprefix(f"line {line}").removeprefix(": ")
        return cls(line, error.code, error.message, place)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some rows' tokens, on their way between processes."""

    ids: bytes
    learned: bytes
    ends: list[int]
    lines: list[int]
    rows: int
    cut_prompts: int
    faults: list[RowFault]


class TokenWriter:
    """Collects rendered rows in memory."""

    def __init__(self) -> None:
        self._ids, self._learned = array("i"), bytearray()
        self._ends, self._lines = array("q"), array("q")
        self.rows = 0
        """All that were rendered, those without a token too."""
        self.cut_prompts = 0
        self.faults: list[RowFault] = []
        """Faults of the rows that could not be rendered, where they are listed instead of raised."""

    def add(self, line: int, rendered: Rendered) -> None:
        if not rendered.ids:
            return
        self._ids.extend(rendered.ids)
        self._learned.extend(rendered.learned)
        self._ends.append(len(self._ids))
        self._lines.append(line)
        self.cut_prompts += rendered.cut_prompt

    def extend(self, part: TokenChunk) -> None:
        """Rows that another process has rendered."""
        before = len(self._ids)
        self._ids.frombytes(part.ids)
        self._learned += part.learned
        self._ends.extend(before + end for end in part.ends)
        self._lines.extend(part.lines)
        self.rows += part.rows
        self.cut_prompts += part.cut_prompts
        self.faults += part.faults

    def chunk(self) -> TokenChunk:
        ids, learned = self._ids.tobytes(), bytes(self._learned)
        return TokenChunk(ids, learned, list(self._ends), list(self._lines), self.rows, self.cut_prompts, self.faults)

    def dataset(self) -> TokenDataset:
        ends = np.array(self._ends, dtype=np.int64)
        return TokenDataset(
            _array(self._ids, np.int32),
            _array(self._learned, np.bool_),
            np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1],
            ends,
            np.array(self._lines, dtype=np.int64),
        )


def _array(buffer: Any, kind: Any) -> Any:
    return np.frombuffer(buffer, dtype=kind) if len(buffer) else np.empty(0, dtype=kind)


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
    dataset, report = truncate(writer.dataset(), max_length, truncation)
    report.cut_prompts = writer.cut_prompts
    return dataset, report


def render_rows(
    rows: Iterable[Numbered],
    renderer: Renderer,
    between: Callable[[int], None] = lambda done: None,
    *,
    listing: bool = False,
) -> TokenWriter:
    """All rows as tokens, in this process. `between` gets the number of rows done, and may raise to stop.

    DataError when a row cannot be rendered; with `listing` such rows are among the writer's faults, and rows with two
    answers or none, which no stage trains on yet, are rendered too.
    """
    writer = TokenWriter()
    for chunk in chunks(rows, CHUNK):
        between(writer.rows)
        _render(chunk, renderer, writer, listing)
    return writer


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
            waiting.append(pool.submit(_rendered, chunk, listing))
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


def chunks(rows: Iterable[Numbered], size: int) -> Iterator[list[Numbered]]:
    source = iter(rows)
    while chunk := list(itertools.islice(source, size)):
        yield chunk


def _rendered(rows: list[Numbered], listing: bool) -> TokenChunk:
    """In a helper."""
    return render_rows(rows, helpers.renderer(), listing=listing).chunk()


def _render(chunk: Sequence[Numbered], renderer: Renderer, writer: TokenWriter, listing: bool) -> None:
    """One call for many rows is quicker; it says nothing of the others when one is refused."""
    writer.rows += len(chunk)
    if not listing or not any(isinstance(numbered.row, _APART) for numbered in chunk):
        try:
            rendered = renderer.render_many([(numbered.row, numbered.line) for numbered in chunk])
        except EftError:
            if not listing:
                raise
        else:
            for numbered, row in zip(chunk, rendered, strict=True):
                writer.add(numbered.line, row)
            return
    for numbered in chunk:
        try:
            parts = list(_parts(numbered, renderer))
        except EftError as error:
            writer.faults.append(RowFault.of(numbered.line, error))
        else:
            for part in parts:
                writer.add(numbered.line, part)


def _parts(numbered: Numbered, renderer: Renderer) -> Iterable[Rendered]:
    """A row as token rows: a preference is two of them, each with its prompt."""
    match numbered.row:
        case Preference() as row:
            yield from renderer.render_pair(row, numbered.line)
        case Labelled() as row:
            yield renderer.render_labelled(row, numbered.line)
        case Stepwise() as row:
            yield renderer.render_steps(row, numbered.line)
        case PromptOnly() as row:
            yield renderer.render_prompt(row, numbered.line)
        case row:
            yield renderer.render(row, numbered.line)
