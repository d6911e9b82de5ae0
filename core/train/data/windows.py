"""Where the loop gets its batches from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from core.train.batch import Batch
from core.train.data.dataset import TokenDataset
from core.train.data.order import StepOrder


@dataclass(frozen=True, slots=True)
class Window:
    """The batches of one optimizer step."""

    label_tokens: int
    """Label tokens of the whole step on all ranks; its loss is divided by them."""
    batches: tuple[Callable[[], Batch], ...]
    """Batches of this rank, each made when it is called."""


class Feed(Protocol):
    """Batches by the number of their optimizer step; a stateful part of the engine."""

    def window(self, step: int) -> Window:
        """Batches of a 0-based step."""
        ...

    def epochs_after(self, steps: int) -> float:
        """Passes over the rows that so many steps are."""
        ...

    def translate(self, step: int, micro_steps: int) -> int | None:
        """As StepOrder.translate."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RowFeed:
    """Batches of rows that are all at hand."""

    def __init__(self, dataset: TokenDataset, order: StepOrder, *, packed: bool, pad_token_id: int) -> None:
        self.dataset, self.order, self.packed, self.pad_token_id = dataset, order, packed, pad_token_id

    def window(self, step: int) -> Window:
        counts, all_rows = self.dataset.label_counts, self.order.rows_of(step)
        label_tokens = sum(counts[row] for row in all_rows)
        return Window(label_tokens, tuple(self._batch(rows, all_rows[0]) for rows in self.order.window(step)))

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
