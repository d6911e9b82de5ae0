"""Batches of rows that are read while the run goes on: never more than two blocks of them at hand.

A block is BLOCK_ROWS rows of the stream, shuffled and cut into steps as if it were an epoch. Which rows it holds is
decided by the cursor before it, and its order by seed and number: both go into a checkpoint, and resuming reads that
one block again. The last step of a block may be smaller. After the last row the stream begins anew. A block in which no
row has anything to learn is skipped.

Where a block takes longer than a process of its own is worth, one makes the next block while the steps of this one
compute. It makes what would be made here, so nothing but time depends on it. (A thread would not do: rendering is
Python, and every operation of a step would wait for it.)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from core.data.stream import Cursor
from core.spec.axes.batching import Packed
from core.spec.axes.data import RowFormat
from core.spec.job import JobSpec
from core.spec.run.orders import DataOrder
from core.train.data.dataset import TokenDataset
from core.train.data.loaders import Prelude, RowLoader, Shares, StepBatches
from core.train.data.order import StepOrder, build_order
from core.train.data.reader import refuse_mixed, refuse_rows
from core.train.data.tokenise.blocks import MadeBlock, make_block, read_block
from core.train.data.tokenise.chunks import TokenWriter, render_rows
from core.train.data.tokenise.helpers import Helpers, made_ahead
from core.train.data.tokenise.whole import dataset_of
from core.train.data.truncate import DataReport, fitted, nothing_to_learn
from core.train.examples.mismatched import arrange
from core.train.render.renderer import Renderer

BLOCK_ROWS = 10_000
AHEAD_SECONDS = 2.0
"""A block that takes longer is made ahead; a process that can do so takes a second to start."""


class StreamLoader:
    """See the module; a StepLoader (core/train/data/loaders.py)."""

    def __init__(
        self,
        data: DataOrder,
        spec: JobSpec,
        renderer_of: Callable[[RowFormat], Renderer],
        *,
        between: Callable[[], None],
        notice: Callable[[str], None],
        model_dir: Path | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`notice` is called with words when a block is skipped. `model_dir`: where a process that works ahead finds
        the tokenizer; None: there is none. Of several ranks each reads all rows, and takes its own batches of them.
        DataError when no row of a whole pass has anything to learn."""
        self.pad_token_id = 0
        self.shares: Shares = lambda lengths, labels: {}
        """The stage's; set before the first step."""
        self.prelude: Prelude | None = None
        """As RowLoader has it; set with `shares`."""
        self.prepare: Callable[[TokenDataset], None] | None = None
        """Gives the rows of a block what they need before their first batch; None: nothing. Called once a block."""
        self.share_prompts = False
        """As TokenDataset has it, for every block."""
        self._prepared: TokenDataset | None = None
        self._rank, self._world = rank, world
        self._data, self._spec, self._between, self._block_rows = data, spec, between, BLOCK_ROWS
        self._notice, self._told = notice, False
        began = time.monotonic()
        rows, end, formats = read_block(data, None, self._block_rows, between)
        refuse_mixed(formats)
        refuse_rows(spec.stage, min(formats))
        self.format: RowFormat = min(formats)
        self.renderer = renderer_of(self.format)
        writer = render_rows(rows, self.renderer, lambda _: between())
        slow = time.monotonic() - began >= AHEAD_SECONDS
        self._helpers = Helpers(1, self.renderer.options, model_dir) if slow and model_dir is not None else None
        self._ahead: Future[MadeBlock] | None = None
        self._block = self._first(MadeBlock(writer.chunk(), end, False, formats))

    @property
    def report(self) -> DataReport:
        """What became of the rows of the current block."""
        return self._block.report

    @property
    def dataset(self) -> TokenDataset:
        """The rows of the current block."""
        return self._block.dataset

    def batches(self, step: int) -> StepBatches:
        self._go_to(step)
        packed, block = isinstance(self._spec.batching, Packed), self._block
        block.dataset.share_prompts = self.share_prompts
        if self.prepare is not None and self._prepared is not block.dataset:
            self.prepare(block.dataset)
            self._prepared = block.dataset
        rows = RowLoader(
            block.dataset,
            block.order,
            self.shares,
            packed=packed,
            pad_token_id=self.pad_token_id,
            prelude=self.prelude,
        )
        return rows.batches(step - block.place.first_step)

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
        made = make_block(self._data, place.start, self._block_rows, self.renderer, self._between)
        block, _ = self._taken(made, place)
        if block is None:
            raise ValueError("the rows of its block have nothing to learn any more: they are other rows")
        self._block = block
        self._block.order.load_state_dict(state["order"])

    # --- blocks --------------------------------------------------------------------------------------

    def _first(self, made: MadeBlock) -> _Block:
        """The first block with something to learn, given the very first one."""
        place, longest = _Place(0, 0, 0, None), 0
        while True:
            block, report = self._taken(made, place)
            if block is not None:
                return block
            longest = max(longest, report.longest)
            place, made = self._made_behind(place, made.end)
            if place.epoch:
                raise nothing_to_learn(self._spec.training.max_length, longest)

    def _go_to(self, step: int) -> None:
        """Steps are asked for in order. A request to stop in the midst of it leaves the block at hand as it is."""
        while step >= (first_step := self._block.place.first_step + self._block.order.steps_of(0)):
            place, end, block = replace(self._block.place, first_step=first_step), self._block.end, None
            while block is None:  # it ends: in each pass there is the block of `_first`
                place, made = self._made_behind(place, end)
                block, _ = self._taken(made, place)
                end = made.end
            self._block = block

    def _made_behind(self, place: _Place, end: Cursor | None) -> tuple[_Place, MadeBlock]:
        """The block behind the one at `place`, which ends at `end`; its first step is the one that `place` has."""
        if self._ahead is not None and self._helpers is not None:
            made = self._helpers.result(self._ahead, self._between)
        else:
            made = make_block(self._data, end, self._block_rows, self.renderer, self._between)
        epoch, start = (place.epoch + 1, None) if made.anew else (place.epoch, end)
        return _Place(place.number + 1, epoch, place.first_step, start), made

    def _taken(self, made: MadeBlock, place: _Place) -> tuple[_Block | None, DataReport]:
        """A block, or None where no row has anything to learn; and the next one begun."""
        refuse_mixed(made.formats | {self.format})
        writer = TokenWriter()
        writer.extend(made.part)
        limit = self._spec.training.max_length
        whole = arrange(dataset_of(writer), self._spec.stage, self._spec.training.seed + place.number)
        dataset, report = fitted(self._spec, whole)
        report.cut_prompts = writer.cut_prompts
        if self._helpers is not None:
            self._ahead = self._helpers.submit(made_ahead, self._data, made.end, self._block_rows)
        if not len(dataset):
            self._tell_skipped(report, limit)
            return None, report
        order = order_of(self._spec, dataset, place.number, rank=self._rank, world=self._world)
        return _Block(place, made.end, dataset, report, order), report

    def _tell_skipped(self, report: DataReport, limit: int) -> None:
        """The first one of an attempt."""
        if not self._told:
            message = (
                f"a block of {report.dropped} streamed rows has nothing to learn within training.max_length = {limit} "
                f"tokens and is skipped; its longest row has {report.longest}. Further blocks are skipped in silence"
            )
            self._notice(message)
            self._told = True


def order_of(spec: JobSpec, block: TokenDataset, number: int, *, rank: int = 0, world: int = 1) -> StepOrder:
    """The order of a block's rows: that of an epoch, with a seed of its own."""
    order = build_order(spec, block.sizes(packed=isinstance(spec.batching, Packed)), rank=rank, world=world)
    text = f"block {spec.training.seed} {number}"
    order.seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return order


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
    order: StepOrder
