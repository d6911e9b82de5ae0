"""Tokenised rows, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.train.batch import IGNORE_INDEX, Batch


class TokenDataset:
    """Rows as spans of two flat arrays, five bytes a token; the arrays may be files that are mapped into memory."""

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        learned: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
    ) -> None:
        """ids and learned [tokens]; starts, ends, and the line of the file each row is from [rows]. Every row has at
        least one token; nothing is learned at the first token of a row, whatever `learned` says."""
        self.ids, self.learned, self.starts, self.ends, self.lines = ids, learned, starts, ends, lines
        self.lengths: list[int] = (ends - starts).tolist()
        self.label_counts: list[int] = _count(learned, starts, ends).tolist()
        self.held: object = None
        """What has to live as long as these rows do: the lease of the files that the arrays are."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(int32 ids, bool learned) of one row."""
        ids, learned = self._row(index)
        return torch.from_numpy(ids.copy()), torch.from_numpy(learned)

    def collate(self, rows: Iterable[int], pad_token_id: int) -> Batch:
        """The rows side by side, padded on the right to the longest."""
        items = [self._row(index) for index in rows]
        lengths = tuple(len(ids) for ids, _ in items)
        input_ids = np.full((len(items), max(lengths)), pad_token_id, dtype=np.int64)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        for row, (ids, learned) in enumerate(items):
            input_ids[row, : len(ids)] = ids
            labels[row, : len(ids)] = np.where(learned, ids, IGNORE_INDEX)
        count = sum(int(learned.sum()) for _, learned in items)
        return Batch(
            torch.from_numpy(input_ids), torch.from_numpy(labels), lengths, count, before_labels=_before_labels(labels)
        )

    def pack(self, rows: Iterable[int]) -> Batch:
        """The rows end to end."""
        items = [self._row(index) for index in rows]
        lengths = tuple(len(ids) for ids, _ in items)
        ids = np.concatenate([ids for ids, _ in items]).astype(np.int64)
        learned = np.concatenate([learned for _, learned in items])
        labels = np.where(learned, ids, IGNORE_INDEX)
        return Batch(
            torch.from_numpy(ids).unsqueeze(0),
            torch.from_numpy(labels).unsqueeze(0),
            lengths,
            int(learned.sum()),
            torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            _before_labels(labels),
        )

    def blank(self, row: int, pad_token_id: int, *, packed: bool) -> Batch:
        """A batch that nothing is learned from, for a rank that has no rows while the others compute."""
        batch = self.pack([row]) if packed else self.collate([row], pad_token_id)
        nothing = torch.full_like(batch.labels, IGNORE_INDEX)
        return replace(batch, labels=nothing, label_tokens=0, before_labels=torch.empty(0, dtype=torch.int64))

    def _row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        start, end = self.starts[index], self.ends[index]
        learned = self.learned[start:end].copy()
        learned[0] = False  # nothing comes before the first token to predict it from
        return self.ids[start:end], learned


def _before_labels(labels: npt.NDArray[np.int64]) -> Tensor:
    """As Batch.label_positions; no row's first token has a label."""
    return torch.from_numpy(np.flatnonzero(labels.ravel() != IGNORE_INDEX) - 1)


def _count(
    learned: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Learned tokens of each span behind its first."""
    counts = np.zeros(len(starts), dtype=np.int64)
    at = np.flatnonzero(ends - starts > 1)
    if len(at):
        edges = np.stack([starts[at] + 1, ends[at]], axis=1).ravel()
        edges = edges[:-1] if edges[-1] == len(learned) else edges  # the last sum goes to the end by itself
        counts[at] = np.add.reduceat(learned, edges, dtype=np.int64)[::2]
    return counts


def eval_batches(
    dataset: TokenDataset,
    batch_size: int,
    pad_token_id: int,
    *,
    most_tokens: int,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """All rows once, those of like length together: less padding, the same figures. Batches are those of `spans`. Of
    several ranks each has every `world`-th batch; the batches are those of a run of one."""
    order: Sequence[int] = sorted(range(len(dataset)), key=dataset.lengths.__getitem__)
    found = spans([dataset.lengths[row] for row in order], batch_size, most_tokens)
    for start, end in found[rank::world]:
        yield dataset.collate(order[start:end], pad_token_id)


def spans(lengths: Sequence[int], most: int, most_tokens: int) -> list[tuple[int, int]]:
    """Cut rows of these lengths, shortest first, into spans of at most `most` rows and, padding counted, `most_tokens`
    tokens; a row that has more is alone."""
    found: list[tuple[int, int]] = []
    start = 0
    for at, length in enumerate(lengths):
        if at > start and (at - start == most or (at - start + 1) * length > most_tokens):
            found.append((start, at))
            start = at
    return [*found, (start, len(lengths))] if lengths else found
