"""The rows of a run as tokens, from the cache or made now: what a training job and the preview of one do alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.spec.run.orders import DataOrder, RunOrder
from core.train.data.cache import TokenCache, TokenisedRows
from core.train.data.reader import count_of, refuse_rows, rows_of
from core.train.data.tokenise.chunks import RowFault, render_rows
from core.train.data.tokenise.whole import PARALLEL_ROWS, dataset_of, processes_for, render_rows_in_parallel
from core.train.render.renderer import Renderer, renderer_of

OnRows = Callable[[int, int | None], None]
"""(rows done, rows in all or None where that is not known); may raise to stop."""


@dataclass(frozen=True, slots=True)
class Read:
    tokens: TokenisedRows
    renderer: Renderer
    faults: list[RowFault]
    """With `listing`: the rows that training would refuse. They are not among the tokens."""


class TokenReader:
    """Reads, renders and keeps the rows of an order; or finds them tokenised already."""

    def __init__(self, order: RunOrder, tokenizer: Any, told: OnRows, notice: Callable[[str], None]) -> None:
        """`notice` is told what did not work with the cache; it costs time alone."""
        self._spec, self._model_dir, self._tokenizer = (
            order.spec,
            Path(order.tokenizer_dir or order.model_dir),
            tokenizer,
        )
        self._told, self._notice = told, notice
        self._cache = None if order.cache_dir is None else TokenCache(Path(order.cache_dir))

    def read(self, data: DataOrder, renderer: Renderer | None = None, *, listing: bool = False) -> Read:
        """`renderer`: that of the training rows, for the held-out ones. `listing`: see `render_rows`.
        DataError, SpecError, HelperKilled."""
        if self._cache is None:
            return self._made(data, renderer, listing)
        source = self._cache.source_key(data)
        known = self._cache.format_of(source)
        if known is not None:
            if not listing:
                refuse_rows(self._spec.stage, known)
            ours = renderer or renderer_of(self._spec, known, self._tokenizer)
            if (found := self._cache.load(source, ours.fingerprint())) is not None:
                return Read(found, ours, [])
        made = self._made(data, renderer, listing)
        if not made.faults:
            kept = self._cache.keep(source, made.renderer.fingerprint(), made.tokens)
            made = Read(kept, made.renderer, [])
        for fault in self._cache.faults:
            self._notice(fault)
        self._cache.faults.clear()
        return made

    def _made(self, data: DataOrder, renderer: Renderer | None, listing: bool) -> Read:
        row_format, passing = rows_of(data)
        if not listing:
            refuse_rows(self._spec.stage, row_format)
        ours = renderer or renderer_of(self._spec, row_format, self._tokenizer)
        first = list(itertools.islice(passing, PARALLEL_ROWS))
        many = len(first) == PARALLEL_ROWS
        total = count_of(data) if many else len(first)
        rows = itertools.chain(first, passing)
        if (processes := processes_for(len(first))) > 1:
            writer = render_rows_in_parallel(
                rows, ours.options, self._model_dir, processes, lambda done: self._told(done, total), listing=listing
            )
        else:
            writer = render_rows(rows, ours, lambda done: self._told(done, total), listing=listing)
        return Read(TokenisedRows(dataset_of(writer), row_format, writer.cut_prompts, writer.rows), ours, writer.faults)
