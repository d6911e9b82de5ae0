"""Where the loop gets its batches from: all of an optimizer step at once, by the number of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from core.train.batch import Batch
from core.train.data.dataset import TokenDataset
from core.train.data.order import StepOrder
from core.train.stage import Totals


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of one optimizer step."""

    totals: Totals
    """Divisors of the step's loss, over all ranks."""
    batches: tuple[Callable[[], Batch], ...]
    """Batches of this rank, each made when it is called for."""


Shares = Callable[[Sequence[int], Sequence[int]], Totals]
"""What a row adds to the totals of its step; see `Stage.shares`."""


class StepLoader(Protocol):
    """Batches by the number of their optimizer step; a stateful part of the engine."""

    def batches(self, step: int) -> StepBatches:
        """The batches of a 0-based step."""
        ...

    def epochs_after(self, steps: int) -> float:
        """Passes over the rows that so many steps are."""
        ...

    def translate(self, step: int, micro_steps: int) -> int | None:
        """As StepOrder.translate."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RowLoader:
    """Batches of rows that are all at hand; a StepLoader."""

    def __init__(
        self, dataset: TokenDataset, order: StepOrder, shares: Shares, *, packed: bool, pad_token_id: int
    ) -> None:
        self.dataset, self.order, self.shares = dataset, order, shares
        self.packed, self.pad_token_id = packed, pad_token_id

    def batches(self, step: int) -> StepBatches:
        rows = self.order.rows_of(step)
        totals: Counter[str] = Counter()
        for row in rows:
            totals.update(self.shares([self.dataset.lengths[row]], [self.dataset.label_counts[row]]))
        return StepBatches(totals, tuple(self._batch(some, rows[0]) for some in self.order.window(step)))

    def _batch(self, rows: list[int], any_row: int) -> Callable[[], Batch]:
        if not rows:
            return lambda: self.dataset.blank(any_row, self.pad_token_id, packed=self.packed)
        if self.packed:
            return lambda: self.dataset.pack(rows)
        return lambda: self.dataset.collate(rows, self.pad_token_id)

    def epochs_after(self, steps: int) -> float:
        return self.order.epochs_after(steps)

    def translate(self, step: int, micro_steps: int) -> int | None:
        return self.order.translate(step, micro_steps)

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)
