"""Where the loop gets its batches from: all of an optimizer step at once, by the number of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from core.train.batch import Batch, continue_prompts
from core.train.data.dataset import TokenDataset, eval_rows
from core.train.data.order import StepOrder
from core.train.stage import Totals


@dataclass(frozen=True, slots=True)
class StepBatches:
    """The batches of one optimizer step."""

    totals: Totals
    """Divisors of the step's loss, over all ranks."""
    batches: tuple[Callable[[], Batch], ...]
    """Batches of this rank, each made when it is called for."""
    prelude: tuple[Callable[[], Batch], ...] = ()
    """Batches of this rank's share of the step for `Stage.prelude`, however `batches` are cut."""
    continued: bool = False
    """Whether the only batch has those rows beside it, and nothing is looked at beforehand."""


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


@dataclass(frozen=True, slots=True)
class Prelude:
    """What a stage looks at before a step (`Stage.prelude`), and how much at once."""

    only: tuple[int, ...]
    """`Stage.prelude_sequences`."""
    most_rows: int
    """Examples of one pass at most."""
    most_tokens: int
    """Tokens of one pass at most, padding counted."""


class RowLoader:
    """Batches of rows that are all at hand; a StepLoader."""

    def __init__(
        self,
        dataset: TokenDataset,
        order: StepOrder,
        shares: Shares,
        *,
        packed: bool,
        pad_token_id: int,
        prelude: Prelude | None = None,
    ) -> None:
        """`prelude`: None where the stage looks at nothing beforehand."""
        self.dataset, self.order, self.shares = dataset, order, shares
        self.packed, self.pad_token_id, self.prelude = packed, pad_token_id, prelude

    def batches(self, step: int) -> StepBatches:
        rows = self.order.rows_of(step)
        totals: Counter[str] = Counter()
        for row in rows:
            totals.update(self.shares(*self.dataset.counts(row)))
        window = self.order.window(step)
        if self.prelude is not None and self.dataset.continue_prompts and self.order.world == len(window) == 1:
            return StepBatches(totals, (partial(self._with_beside, window[0]),), continued=True)
        return StepBatches(totals, tuple(self._batch(some, rows[0]) for some in window), self._before(rows))

    def _with_beside(self, rows: Sequence[int]) -> Batch:
        assert self.prelude is not None
        return continue_prompts(self.dataset.pack(rows), self.dataset.pack(rows, self.prelude.only))

    def _before(self, rows: Sequence[int]) -> tuple[Callable[[], Batch], ...]:
        if (wanted := self.prelude) is None:
            return ()
        mine = sorted(rows)[self.order.rank :: self.order.world]
        cut = eval_rows(self.dataset, mine, wanted.most_rows, wanted.most_tokens, wanted.only)
        return tuple(partial(self._looked_at, some) for some in cut)

    def _looked_at(self, rows: Sequence[int]) -> Batch:
        assert self.prelude is not None
        if self.packed:
            return self.dataset.pack(rows, self.prelude.only)
        return self.dataset.collate(rows, self.pad_token_id, self.prelude.only)

    def _batch(self, rows: list[int], any_row: int) -> Callable[[], Batch]:
        if not rows:
            return lambda: self.dataset.blank(any_row, self.pad_token_id, packed=self.packed)
        if self.packed:
            return lambda: self.dataset.pack(rows)
        return lambda: self.dataset.collate(rows, self.pad_token_id)

    def rows_until(self, steps: int) -> Sequence[int]:
        """Rows of the first steps, each once, ascending."""
        if steps >= self.order.steps_of(0):
            return range(self.order.rows)
        return sorted({row for step in range(steps) for row in self.order.rows_of(step)})

    def epochs_after(self, steps: int) -> float:
        return self.order.epochs_after(steps)

    def translate(self, step: int, micro_steps: int) -> int | None:
        return self.order.translate(step, micro_steps)

    def state_dict(self) -> dict[str, Any]:
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)
