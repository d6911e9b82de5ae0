"""Rows as tokens in memory, and on their way between processes. A helper process imports this, and no torch."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from core.data.rows import Numbered
from core.errors import EftError
from core.train.examples.example import Example, example_of, examples_of
from core.train.render.renderer import Renderer

CHUNK = 64
"""Rows of one call into the tokenizer."""


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
    sequences: int
    values: dict[str, bytes]
    token_values: dict[str, bytes]
    rows: int
    cut_prompts: int
    faults: list[RowFault]


class TokenWriter:
    """Collects examples in memory."""

    def __init__(self) -> None:
        self._ids, self._learned = array("i"), bytearray()
        self._ends, self._lines = array("q"), array("q")
        self._sequences = 1
        self._values: dict[str, array[float]] = {}
        self._token_values: dict[str, array[float]] = {}
        self.rows = 0
        """All that were rendered, those without a token too."""
        self.cut_prompts = 0
        self.faults: list[RowFault] = []
        """Faults of the rows that could not be rendered, where they are listed instead of raised."""

    def add(self, line: int, example: Example) -> None:
        """Add an example; one with a sequence that has no token at all is left out."""
        if not all(rendered.ids for rendered in example.sequences):
            return
        self._sequences = len(example.sequences)
        for rendered in example.sequences:
            self._ids.extend(rendered.ids)
            self._learned.extend(rendered.learned)
            self._ends.append(len(self._ids))
        self._lines.append(line)
        for name, value in example.values.items():
            self._values.setdefault(name, array("f")).append(value)
        for name, parts in example.token_values.items():
            for part in parts:
                self._token_values.setdefault(name, array("f")).extend(part)
        self.cut_prompts += any(rendered.cut_prompt for rendered in example.sequences)

    def extend(self, part: TokenChunk) -> None:
        """Add examples that another process has rendered."""
        before = len(self._ids)
        if part.lines:
            self._sequences = part.sequences
        for mine, theirs in ((self._values, part.values), (self._token_values, part.token_values)):
            for name, raw in theirs.items():
                mine.setdefault(name, array("f")).frombytes(raw)
        self._ids.frombytes(part.ids)
        self._learned += part.learned
        self._ends.extend(before + end for end in part.ends)
        self._lines.extend(part.lines)
        self.rows += part.rows
        self.cut_prompts += part.cut_prompts
        self.faults += part.faults

    def chunk(self) -> TokenChunk:
        ids, learned = self._ids.tobytes(), bytes(self._learned)
        return TokenChunk(
            ids,
            learned,
            list(self._ends),
            list(self._lines),
            self._sequences,
            {name: values.tobytes() for name, values in self._values.items()},
            {name: values.tobytes() for name, values in self._token_values.items()},
            self.rows,
            self.cut_prompts,
            self.faults,
        )

    def arrays(self) -> dict[str, Any]:
        """What a TokenDataset is made of (core/train/data/dataset.py), by its names."""
        ends = np.array(self._ends, dtype=np.int64)
        return {
            "ids": _array(self._ids, np.int32),
            "learned": _array(self._learned, np.bool_),
            "starts": np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1],
            "ends": ends,
            "lines": np.array(self._lines, dtype=np.int64),
            "sequences": self._sequences,
            "values": {name: _array(values, np.float32) for name, values in self._values.items()},
            "token_values": {name: _array(values, np.float32) for name, values in self._token_values.items()},
        }


def _array(buffer: Any, kind: Any) -> Any:
    return np.frombuffer(buffer, dtype=kind) if len(buffer) else np.empty(0, dtype=kind)


def render_rows(
    rows: Iterable[Numbered],
    renderer: Renderer,
    between: Callable[[int], None] = lambda done: None,
    *,
    listing: bool = False,
) -> TokenWriter:
    """All rows as tokens, in this process. `between` gets the number of rows done, and may raise to stop.

    DataError when a row cannot be rendered; with `listing` such rows are among the writer's faults.
    """
    writer = TokenWriter()
    for chunk in chunks(rows, CHUNK):
        between(writer.rows)
        _render(chunk, renderer, writer, listing)
    return writer


def chunks(rows: Iterable[Numbered], size: int) -> Iterator[list[Numbered]]:
    source = iter(rows)
    while chunk := list(itertools.islice(source, size)):
        yield chunk


def _render(chunk: Sequence[Numbered], renderer: Renderer, writer: TokenWriter, listing: bool) -> None:
    """One call for many rows is quicker; it says nothing of the others when one is refused."""
    writer.rows += len(chunk)
    try:
        examples = examples_of(chunk, renderer)
    except EftError:
        if not listing:
            raise
    else:
        for numbered, example in zip(chunk, examples, strict=True):
            writer.add(numbered.line, example)
        return
    for numbered in chunk:
        try:
            example = example_of(numbered, renderer)
        except EftError as error:
            writer.faults.append(RowFault.of(numbered.line, error))
        else:
            writer.add(numbered.line, example)
