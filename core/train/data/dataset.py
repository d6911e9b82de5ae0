"""Tokenised examples, and batches of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.train.batch import IGNORE_INDEX, Batch, common_prefix, share_prefixes


class TokenDataset:
    """Examples of one or more sequences. Sequences are spans of two flat arrays, five bytes a token; the arrays may be
    files that are mapped into memory."""

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        learned: npt.NDArray[np.bool_],
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
        *,
        sequences: int = 1,
        trained: int | None = None,
        values: Mapping[str, npt.NDArray[np.float32]] | None = None,
        token_values: Mapping[str, npt.NDArray[np.float32]] | None = None,
    ) -> None:
        """ids and learned [tokens]; starts and ends [examples · sequences], those of an example side by side; lines
        [examples]: the line of the file each is from. Every sequence has at least one token; nothing is learned at the
        first token of one, whatever `learned` says.

        `trained`: the first so many sequences of each example are in the batches of training, the others are looked at
        before a step alone (`Stage.prelude`); None: all of them. `values` [examples] or [examples, sequences],
        `token_values` [tokens]: see Batch.
        """
        self.ids, self.learned, self.starts, self.ends, self.lines = ids, learned, starts, ends, lines
        self.sequences, self.trained = sequences, sequences if trained is None else trained
        self.values, self.token_values = dict(values or {}), dict(token_values or {})
        self.sequence_lengths = _integers(ends - starts)
        self.sequence_labels = _integers(_count(learned, starts, ends))
        self.lengths = self._summed(self.sequence_lengths)
        """Tokens of each example, in the sequences that are trained."""
        self.label_counts = self._summed(self.sequence_labels)
        self.share_prompts = False
        """Whether packed batches have a beginning that the sequences of an example have in common once."""
        self.groups: Sequence[int] | None = None
        """Packed batches have a beginning that examples of one group, numbered here for each, have in common once; of
        examples with one sequence. None: no groups."""
        self.continue_prompts = False
        """Whether the sequences that are looked at before a step continue the prompts of the trained ones, where the
        step is one packed batch."""
        self.held: object = None
        """What has to live as long as these rows do: the lease of the files that the arrays are."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(int32 ids, bool learned) of an example's first sequence."""
        return self.sequence(index * self.sequences)

    def sequence(self, number: int) -> tuple[Tensor, Tensor]:
        """(int32 ids, bool learned) of one sequence: those of example n have the numbers from n · `sequences` on."""
        ids, learned = self._row(number)
        return torch.from_numpy(ids.copy()), torch.from_numpy(learned)

    def selected(self, examples: npt.NDArray[np.int64]) -> TokenDataset:
        """These examples alone: views of the same tokens."""
        rows = (examples[:, None] * self.sequences + np.arange(self.sequences)).ravel()
        return self.replaced(
            self.starts[rows],
            self.ends[rows],
            self.lines[examples],
            {name: values[examples] for name, values in self.values.items()},
        )

    def replaced(
        self,
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
        values: Mapping[str, npt.NDArray[np.float32]],
    ) -> TokenDataset:
        """Other spans of the same tokens."""
        found = TokenDataset(
            self.ids,
            self.learned,
            starts,
            ends,
            lines,
            sequences=self.sequences,
            trained=self.trained,
            values=values,
            token_values=self.token_values,
        )
        found.held = self.held
        return found

    def sizes(self, *, packed: bool, only: Sequence[int] | None = None) -> Sequence[int]:
        """What each example takes of a batch: packed, its tokens; padded, its sequences times the longest of them.
        `only`: as `collate` has it."""
        if self.sequences == 1 or (packed and only is None):
            return self.lengths
        places = list(range(self.trained) if only is None else only)
        lengths = np.asarray(self.sequence_lengths, dtype=np.int64).reshape(-1, self.sequences)[:, places]
        return _integers(lengths.sum(axis=1) if packed else lengths.max(axis=1) * len(places))

    def counts(self, example: int) -> tuple[Sequence[int], Sequence[int]]:
        """(tokens, label tokens) of each sequence of an example."""
        part = slice(example * self.sequences, (example + 1) * self.sequences)
        return self.sequence_lengths[part], self.sequence_labels[part]

    def collate(self, rows: Iterable[int], pad_token_id: int, only: Sequence[int] | None = None) -> Batch:
        """The examples' sequences side by side, padded on the right to the longest. `only`: the places of the
        sequences that are taken of each example; None: those that are trained."""
        examples, numbers, places = self._chosen(rows, only)
        items = [self._row(number) for number in numbers]
        lengths = tuple(len(ids) for ids, _ in items)
        input_ids = np.full((len(items), max(lengths)), pad_token_id, dtype=np.int64)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        for row, (ids, learned) in enumerate(items):
            input_ids[row, : len(ids)] = ids
            labels[row, : len(ids)] = np.where(learned, ids, IGNORE_INDEX)
        counts = tuple(int(learned.sum()) for _, learned in items)
        return Batch(
            torch.from_numpy(input_ids),
            torch.from_numpy(labels),
            lengths,
            sum(counts),
            before_labels=_before_labels(labels),
            sequences=len(places),
            counts=counts,
            values=self._values(examples, places),
            token_values=self._token_values(numbers),
        )

    def pack(self, rows: Iterable[int], only: Sequence[int] | None = None) -> Batch:
        """The examples' sequences end to end, or as `share_prompts` says. `only`: as `collate` has it."""
        examples, numbers, places = self._chosen(rows, only)
        items = [self._row(number) for number in numbers]
        lengths = tuple(len(ids) for ids, _ in items)
        ids = np.concatenate([ids for ids, _ in items]).astype(np.int64)
        learned = np.concatenate([learned for _, learned in items])
        labels = np.where(learned, ids, IGNORE_INDEX)
        counts = tuple(int(learned.sum()) for _, learned in items)
        batch = Batch(
            torch.from_numpy(ids).unsqueeze(0),
            torch.from_numpy(labels).unsqueeze(0),
            lengths,
            sum(counts),
            torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            _before_labels(labels),
            len(places),
            counts,
            self._values(examples, places),
            self._token_values(numbers),
        )
        if self.groups is not None:
            members = [self.groups[example] for example in examples]
            return share_prefixes(batch, [members.index(group) for group in members])
        return share_prefixes(batch) if self.share_prompts and len(places) > 1 else batch

    def shared_tokens(self) -> int:
        """Tokens of all examples that are the same as in the first sequence of their example, from the beginning on:
        what `share_prompts` saves."""
        if self.trained == 1:
            return 0
        spans = [self.ids[start:end] for start, end in zip(self.starts, self.ends, strict=True)]
        return sum(
            common_prefix(spans[first], spans[first + place])
            for first in range(0, len(spans), self.sequences)
            for place in range(1, self.trained)
        )

    def blank(self, row: int, pad_token_id: int, *, packed: bool) -> Batch:
        """A batch that nothing is learned from, for a rank that has no rows while the others compute."""
        batch = self.pack([row]) if packed else self.collate([row], pad_token_id)
        nothing = torch.full_like(batch.labels, IGNORE_INDEX)
        return replace(
            batch,
            labels=nothing,
            label_tokens=0,
            before_labels=torch.empty(0, dtype=torch.int64),
            counts=(0,) * len(batch.lengths),
            token_values={name: value[:0] for name, value in batch.token_values.items()},
        )

    def _chosen(
        self, rows: Iterable[int], only: Sequence[int] | None
    ) -> tuple[npt.NDArray[np.int64], list[int], Sequence[int]]:
        """Numbers of the examples, of their sequences, and the places of those in an example."""
        places = range(self.trained) if only is None else only
        examples = list(rows)
        numbers = [example * self.sequences + place for example in examples for place in places]
        return np.asarray(examples, dtype=np.int64), numbers, places

    def _values(self, examples: npt.NDArray[np.int64], places: Sequence[int]) -> dict[str, Tensor]:
        found = {}
        for name, values in self.values.items():
            chosen = values[examples]
            found[name] = torch.from_numpy(np.array(chosen[:, list(places)] if chosen.ndim == 2 else chosen))
        return found

    def _token_values(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        found = {}
        for name, values in self.token_values.items():
            parts = [values[self.starts[n] : self.ends[n]][self._row(n)[1]] for n in numbers]
            found[name] = torch.from_numpy(np.concatenate(parts).astype(np.float32))
        return found

    def _row(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        start, end = self.starts[index], self.ends[index]
        learned = self.learned[start:end].copy()
        learned[0] = False  # nothing comes before the first token to predict it from
        return self.ids[start:end], learned

    def _summed(self, counts: array[int]) -> array[int]:
        """Sums over the trained sequences of each example."""
        if self.sequences == 1:
            return counts
        parts = np.asarray(counts, dtype=np.int64).reshape(-1, self.sequences)[:, : self.trained]
        return _integers(parts.sum(axis=1))


def _integers(values: npt.NDArray[np.int64]) -> array[int]:
    """The numbers as a sequence of Python integers that takes eight bytes each; a list takes 36."""
    found = array("q")
    found.frombytes(np.ascontiguousarray(values).data.cast("B"))
    return found


def _before_labels(labels: npt.NDArray[np.int64]) -> Tensor:
    """As Batch.label_positions; no row's first token has a label."""
    return torch.from_numpy(np.flatnonzero(labels.ravel() != IGNORE_INDEX) - 1)


def _count(
    learned: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Learned tokens of each span behind its first."""
    if learned.strides == (0,) and learned.all():  # one value for all tokens: they need not be read
        behind: npt.NDArray[np.int64] = np.maximum(ends - starts - 1, 0)
        return behind
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
    only: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """All examples once, those of like length together: less padding, the same figures. Batches are those of `spans`.
    Of several ranks each has every `world`-th batch; the batches are those of a run of one. `only`: as
    TokenDataset.collate has it."""
    for rows in eval_rows(dataset, range(len(dataset)), batch_size, most_tokens, only)[rank::world]:
        yield dataset.collate(rows, pad_token_id, only)


def eval_rows(
    dataset: TokenDataset, rows: Sequence[int], batch_size: int, most_tokens: int, only: Sequence[int] | None = None
) -> list[Sequence[int]]:
    """Some examples as the batches of `eval_batches`."""
    sizes = dataset.sizes(packed=False, only=only)
    order: Sequence[int] = sorted(rows, key=sizes.__getitem__)
    return [order[start:end] for start, end in spans([sizes[row] for row in order], batch_size, most_tokens)]


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
