"""Batches of rows that are read while the run goes on: never more than two blocks of them at hand.

A block is BLOCK_ROWS rows of the stream, shuffled and cut into steps as if it were an epoch. Which rows it holds is
decided by the cursor before it, and its order by seed and number: both go into a checkpoint, and resuming reads that
one block again. The last step of a block may be smaller. After the last row the stream begins anew.

Where a block takes longer than a process of its own is worth, one makes the next block while the steps of this one
compute. It makes what would be made here, so nothing but time depends on it. (A thread would not do: rendering is
Python, and every operation of a step would wait for it.)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.data.rows import Numbered
from core.data.stream import Cursor, RowStream
from core.spec.data import RowFormat
from core.spec.job import JobSpec
from core.spec.run import DataOrder
from core.spec.training import Packed
from core.train.data import helpers
from core.train.data.dataset import TokenDataset
from core.train.data.helpers import Helpers
from core.train.data.order import Order, build_order
from core.train.data.reader import refuse_mixed
from core.train.data.tokenise import Part, TokenWriter, render_rows
from core.train.data.truncate import DataReport, truncate
from core.train.data.windows import RowFeed, Window
from core.train.render.renderer import Renderer

BLOCK_ROWS = 10_000
AHEAD_SECONDS = 2.0
"""A block that takes longer is made ahead; a process that can do so takes some seconds to start."""


class StreamFeed:
    """See the module; a windows.Feed."""

    def __init__(
        self,
        data: DataOrder,
        spec: JobSpec,
        renderer_of: Callable[[RowFormat], Renderer],
        *,
        between: Callable[[], None],
        model_dir: Path | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`model_dir`: where a process that works ahead finds the tokenizer; None: there is none. Of several ranks each
        reads all rows, and takes its own batches of them."""
        self.pad_token_id = 0
        self._rank, self._world = rank, world
        self._data, self._spec, self._between, self._block_rows = data, spec, between, BLOCK_ROWS
        began = time.monotonic()
        rows, end, formats = _read(data, None, self._block_rows, between)
        refuse_mixed(formats)
        self.format: RowFormat = min(formats)
        self.renderer = renderer_of(self.format)
        writer = render_rows(rows, self.renderer, lambda _: between())
        slow = time.monotonic() - began >= AHEAD_SECONDS
        self._helpers = Helpers(1, self.renderer.options, model_dir) if slow and model_dir is not None else None
        self._ahead: Future[_Made] | None = None
        self._block = self._taken(_Made(writer.part(), end, False, formats), _Place(0, 0, 0, None))

    @property
    def report(self) -> DataReport:
        """Of the block at hand."""
        return self._block.report

    @property
    def dataset(self) -> TokenDataset:
        """The rows of the block at hand."""
        return self._block.dataset

    def window(self, step: int) -> Window:
        self._go_to(step)
        packed = isinstance(self._spec.batching, Packed)
        feed = RowFeed(self._block.dataset, self._block.order, packed=packed, pad_token_id=self.pad_token_id)
        return feed.window(step - self._block.place.first_step)

    def epochs_after(self, steps: int) -> float:
        """Passes that are over; how far the one at hand has come is not known."""
        return float(self._block.place.epoch)

    def translate(self, step: int, micro_steps: int) -> int | None:
        self._go_to(step)
        return self._block.order.translate(step - self._block.place.first_step, micro_steps)

    def state_dict(self) -> dict[str, Any]:
        return {
            "stream": 1,
            "block_rows": self._block_rows,
            **asdict(self._block.place),
            "order": self._block.order.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError when the checkpoint was made over other rows, or steps of another size."""
        if "stream" not in state:
            raise ValueError("its rows were not streamed (data.streaming)")
        if state["block_rows"] != self._block_rows:
            raise ValueError(f"its blocks had {state['block_rows']} rows, those of this run have {self._block_rows}")
        place = _Place(state["number"], state["epoch"], state["first_step"], state["start"])
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None
        made = _made(self._data, place.start, self._block_rows, self.renderer, self._between)
        self._block = self._taken(made, place)
        self._block.order.load_state_dict(state["order"])

    # --- blocks --------------------------------------------------------------------------------------

    def _go_to(self, step: int) -> None:
        """Steps are asked for in order. A request to stop in the midst of it leaves the block at hand as it is."""
        while step >= self._block.place.first_step + self._block.order.steps_of(0):
            place = self._next()
            if self._ahead is not None and self._helpers is not None:
                made = self._helpers.result(self._ahead, self._between)
            else:
                made = _made(self._data, place.start, self._block_rows, self.renderer, self._between)
            if made.anew:
                place = _Place(place.number, place.epoch + 1, place.first_step, None)
            self._block = self._taken(made, place)

    def _next(self) -> _Place:
        before = self._block.place
        first_step = before.first_step + self._block.order.steps_of(0)
        return _Place(before.number + 1, before.epoch, first_step, self._block.end)

    def _taken(self, made: _Made, place: _Place) -> _Block:
        """A block, and the next one begun."""
        refuse_mixed(made.formats | {self.format})
        writer = TokenWriter()
        writer.extend(made.part)
        dataset, report = truncate(writer.dataset(), self._spec.training.max_length, self._spec.training.truncation)
        report.cut_prompts = writer.cut_prompts
        order = order_of(self._spec, dataset, place.number, rank=self._rank, world=self._world)
        if self._helpers is not None:
            self._ahead = self._helpers.submit(_made_ahead, self._data, made.end, self._block_rows)
        return _Block(place, made.end, dataset, report, order)


def order_of(spec: JobSpec, block: TokenDataset, number: int, *, rank: int = 0, world: int = 1) -> Order:
    """The order of a block's rows: that of an epoch, with a seed of its own."""
    order = build_order(spec, block.lengths, rank=rank, world=world)
    text = f"block {spec.training.seed} {number}"
    order.seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return order


@dataclass(frozen=True, slots=True)
class _Made:
    """The tokens of a block, on their way between processes."""

    part: Part
    end: Cursor | None
    anew: bool
    """The stream had come to its end and begins anew with this block."""
    formats: set[RowFormat]
    """Of its rows."""


def _made(
    data: DataOrder, start: Cursor | None, count: int, renderer: Renderer, between: Callable[[], None] = lambda: None
) -> _Made:
    rows, end, formats = _read(data, start, count, between)
    if anew := not rows:
        rows, end, formats = _read(data, None, count, between)
    return _Made(render_rows(rows, renderer, lambda _: between()).part(), end, anew, formats)


def _made_ahead(data: DataOrder, start: Cursor | None, count: int) -> _Made:
    """In a helper."""
    return _made(data, start, count, helpers.renderer())


def _read(
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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a block is."""

    number: int
    epoch: int
    first_step: int
    start: Cursor | None


@dataclass(frozen=True, slots=True)
class _Block:
    place: _Place
    end: Cursor | None
    dataset: TokenDataset
    report: DataReport
    order: Order
