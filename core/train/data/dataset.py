"""Tokenised rows in memory, the order they are read in, and batches of them."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import DataError
from core.train.batch import IGNORE_INDEX, Batch
from core.train.data.reader import Numbered
from core.train.data.render import Renderer


@dataclass(slots=True)
class DataReport:
    """What became of a file's rows; part of the run record."""

    rows: int = 0
    """Rows in use."""
    tokens: int = 0
    label_tokens: int = 0
    truncated: int = 0
    """Rows longer than max_length, which lost their end."""
    dropped: int = 0
    """Rows with nothing left to learn after that."""
    longest: int = 0
    """Tokens of the longest row before truncation."""
    cut_prompts: int = 0
    """Prompt/completion rows whose tokens merge across the border."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class TokenDataset:
    """Rows as flat arrays: five bytes a token."""

    def __init__(self, ids: Tensor, learned: Tensor, ends: list[int]) -> None:
        """ids int32 [tokens], learned bool [tokens], ends: where each row ends in them."""
        self._ids = ids
        self._learned = learned
        self._ends = [0, *ends]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(int32 ids, bool learned) of one row."""
        start, end = self._ends[index], self._ends[index + 1]
        return self._ids[start:end], self._learned[start:end]

    def length(self, index: int) -> int:
        return self._ends[index + 1] - self._ends[index]

    def labels_of(self, index: int) -> int:
        return int(self[index][1].sum())

    def collate(self, rows: Iterable[int], pad_token_id: int) -> Batch:
        """The rows side by side, padded on the right to the longest."""
        items = [self[index] for index in rows]
        lengths = tuple(len(ids) for ids, _ in items)
        input_ids = torch.full((len(items), max(lengths)), pad_token_id, dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORE_INDEX)
        count = 0
        for row, (ids, learned) in enumerate(items):
            input_ids[row, : len(ids)] = ids
            labels[row, : len(ids)] = torch.where(learned, ids.long(), IGNORE_INDEX)
            count += int(learned.sum())
        return Batch(input_ids, labels, lengths, count)


def tokenise(
    rows: Iterable[Numbered], renderer: Renderer, max_length: int, between: Callable[[], None] = lambda: None
) -> tuple[TokenDataset, DataReport]:
    """Render and truncate. DataError when no row has anything to learn. `between` runs before each row."""
    report = DataReport()
    ids, learned, ends = array("i"), bytearray(), list[int]()
    for numbered in rows:
        between()
        rendered = renderer.render(numbered.row, numbered.line)
        report.longest = max(report.longest, len(rendered.ids))
        report.cut_prompts += rendered.cut_prompt
        report.truncated += len(rendered.ids) > max_length
        mask = rendered.learned[:max_length]
        if not any(mask):
            report.dropped += 1
            continue
        ids.extend(rendered.ids[:max_length])
        learned.extend(mask)
        ends.append(len(ids))
        report.label_tokens += sum(mask)
    report.rows, report.tokens = len(ends), len(ids)
    if not ends:
        raise DataError(
            f"no row has anything to learn within training.max_length = {max_length} tokens; "
            f"the longest row has {report.longest}",
            field="training.max_length",
        )
    dataset = TokenDataset(
        torch.frombuffer(ids, dtype=torch.int32).clone(), torch.frombuffer(learned, dtype=torch.bool).clone(), ends
    )
    return dataset, report


class BatchOrder:
    """Which rows the batches of each optimizer step hold: a pure function of (seed, step), so that a cursor is two
    numbers and resuming needs no replay.

    The rows of a step depend on batch_size x accumulation alone: a run may be gone on with smaller batches and more of
    them. Each epoch is a fresh permutation. Its last batch may be smaller, and its last accumulation window shorter, as
    with transformers' Trainer; no row is dropped.
    """

    def __init__(self, rows: int, *, batch_size: int, accumulation: int, seed: int) -> None:
        self.rows, self.batch_size, self.accumulation, self.seed = rows, batch_size, accumulation, seed
        self.batches_per_epoch = math.ceil(rows / batch_size)
        self.steps_per_epoch = math.ceil(self.batches_per_epoch / accumulation)
        self._saved_batch_size = batch_size
        self._epoch = -1
        self._order: list[int] = []

    def total_steps(self, epochs: float, max_steps: int | None) -> int:
        return max_steps if max_steps is not None else math.ceil(epochs * self.steps_per_epoch)

    def window(self, step: int) -> list[list[int]]:
        """Row numbers of every batch of a 0-based optimizer step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self.epoch_order(epoch)
        first = place * self.accumulation
        last = min(first + self.accumulation, self.batches_per_epoch)
        return [order[at * self.batch_size : (at + 1) * self.batch_size] for at in range(first, last)]

    def state_dict(self) -> dict[str, Any]:
        """The place itself is the engine's (steps, micro_steps); this is what gives it a meaning."""
        return {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """ValueError when the checkpoint was made over other rows, or steps of another size."""
        for name in ("rows", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(f"its data had {name} = {state[name]}, this run has {getattr(self, name)}")
        there, here = state["batch_size"] * state["accumulation"], self.batch_size * self.accumulation
        if there != here:
            raise ValueError(f"its steps had {there} rows, those of this run have {here}")
        self._saved_batch_size = state["batch_size"]

    def translate(self, step: int, micro_steps: int) -> int | None:
        """How many batches of ours hold just the rows of the first `micro_steps` batches of a 0-based step as the
        loaded checkpoint cut it; None when one of ours would begin inside one of those."""
        window = self.window(step)
        total = sum(len(rows) for rows in window)
        done = min(micro_steps * self._saved_batch_size, total)
        if done % self.batch_size and done != total:
            return None
        return math.ceil(done / self.batch_size)

    def epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            digest = hashlib.sha256(f"order {self.seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            self._order = torch.randperm(self.rows, generator=generator).tolist()
            self._epoch = epoch
        return self._order


def eval_batches(dataset: TokenDataset, batch_size: int, pad_token_id: int) -> Iterator[Batch]:
    """All rows once, those of like length together: less padding, the same figures."""
    order = sorted(range(len(dataset)), key=dataset.length)
    for start in range(0, len(order), batch_size):
        yield dataset.collate(order[start : start + batch_size], pad_token_id)
