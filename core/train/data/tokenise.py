"""From rows to tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np

from core.train.data.dataset import TokenDataset
from core.train.data.reader import Numbered
from core.train.data.truncate import DataReport, Truncation, truncate
from core.train.render.renderer import Rendered, Renderer


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

    def dataset(self) -> TokenDataset:
        ends = np.frombuffer(self._ends, dtype=np.int64)
        return TokenDataset(
            np.frombuffer(self._ids, dtype=np.int32),
            np.frombuffer(self._learned, dtype=np.bool_),
            np.concatenate([np.zeros(1, dtype=np.int64), ends])[:-1],
            ends,
            np.frombuffer(self._lines, dtype=np.int64),
        )


def tokenise(
    rows: Iterable[Numbered],
    renderer: Renderer,
    max_length: int,
    between: Callable[[], None] = lambda: None,
    *,
    truncation: Truncation = "cut_right",
) -> tuple[TokenDataset, DataReport]:
    """Render and truncate. DataError when no row has anything to learn. `between` runs before each row."""
    writer = TokenWriter()
    for numbered in rows:
        between()
        writer.add(numbered.line, renderer.render(numbered.row, numbered.line))
    dataset, report = truncate(writer.dataset(), max_length, truncation)
    report.cut_prompts = writer.cut_prompts
    return dataset, report
