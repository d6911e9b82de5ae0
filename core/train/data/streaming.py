"""Batches of rows that are read while the run goes on: never more than two blocks of them at hand.

A block is BLOCK_ROWS rows of the stream, shuffled and cut into steps as if it were an epoch. Which rows it holds is
decided by the cursor before it, and its order by seed and number: both go into a checkpoint, and resuming reads that
one block again. The last step of a block may be smaller. After the last row the stream begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from core.data.rows import Numbered
from core.data.stream import Cursor, RowStream
from core.spec.data import RowFormat
from core.spec.job import JobSpec
from core.spec.run import DataOrder
from core.spec.training import Packed
from core.train.data.dataset import TokenDataset
from core.train.data.order import Order, build_order
from core.train.data.tokenise import render_rows
from core.train.data.truncate import DataReport, truncate
from core.train.data.windows import RowFeed, Window
from core.train.render.renderer import Renderer

BLOCK_ROWS = 10_000


class StreamFeed:
    """See the module; a windows.Feed."""

    def __init__(
        self,
        data: DataOrder,
        spec: JobSpec,
        renderer_of: Callable[[RowFormat], Renderer],
        *,
        between: Callable[[], None],
    ) -> None:
        self.pad_token_id = 0
        self._stream, self._spec, self._between, self._block_rows = RowStream(data), spec, between, BLOCK_ROWS
        rows, end = self._read(None)
        self.format: RowFormat = next(iter(self._stream.formats()))
        self.renderer = renderer_of(self.format)
        self._block = self._made(rows, _Place(0, 0, 0, None), end)

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
        rows, end = self._read(place.start)
        self._block = self._made(rows, place, end)
        self._block.order.load_state_dict(state["order"])

    # --- blocks --------------------------------------------------------------------------------------

    def _go_to(self, step: int) -> None:
        """Steps are asked for in order. A request to stop in the midst of it leaves the block at hand as it is."""
        while step >= self._block.place.first_step + self._block.order.steps_of(0):
            before = self._block.place
            first_step = before.first_step + self._block.order.steps_of(0)
            place = _Place(before.number + 1, before.epoch, first_step, self._block.end)
            rows, end = self._read(place.start)
            if not rows:
                place = _Place(place.number, place.epoch + 1, first_step, None)
                rows, end = self._read(None)
            self._block = self._made(rows, place, end)

    def _read(self, start: Cursor | None) -> tuple[list[Numbered], Cursor | None]:
        rows: list[Numbered] = []
        end = start
        for cursor, numbered in self._stream.rows(start):
            self._between()
            rows.append(numbered)
            end = cursor
            if len(rows) == self._block_rows:
                break
        return rows, end

    def _made(self, rows: list[Numbered], place: _Place, end: Cursor | None) -> _Block:
        training = self._spec.training
        writer = render_rows(rows, self.renderer, lambda _: self._between())
        dataset, report = truncate(writer.dataset(), training.max_length, training.truncation)
        report.cut_prompts = writer.cut_prompts
        order = build_order(self._spec, dataset.lengths)
        text = f"block {training.seed} {place.number}"
        order.seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        return _Block(place, end, dataset, report, order)


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
