"""What goes through the model at once: examples, each of one or more rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """How the rows of a packed batch lie in the line if the beginning that a row has in common with the first row of
    its example is there only once (`share_prefixes`)."""

    places: Tensor
    """int64 [tokens of all rows]: where each token of the rows, end to end, is in the line."""
    lengths: tuple[int, ...]
    """Tokens of each row that are in the line for this row alone; in their order they are the line."""
    boundaries: Tensor
    """int32 [rows + 1]: where those begin in the line, and the end."""
    earlier: int = 0
    """Tokens that lie before the line and are not in this batch: those of a batch that went through the model just
    before, whose keys and values were kept (core/train/attention/kept.py)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side, padded on the right; or packed: all rows end to end in one line, without padding. The rows of
    an example follow one another."""

    input_ids: Tensor
    """int64 [rows, tokens]; packed [1, tokens of all rows], or fewer with `shared`"""
    labels: Tensor
    """int64 [rows, tokens]; packed [1, tokens of all rows]. IGNORE_INDEX where there is no loss, and always at the
    first token of a row"""
    lengths: tuple[int, ...]
    """Tokens of each row, padding not counted."""
    label_tokens: int
    """Labels that are not IGNORE_INDEX."""
    position_ids: Tensor | None = None
    """Packed: int64, of the shape of input_ids, from 0 in each row. None: not packed."""
    boundaries: Tensor | None = None
    """Packed: int32 [rows + 1], where each row begins, and the end."""
    before_labels: Tensor | None = None
    """int64 [label tokens]: see `label_positions`. Found before a batch goes to a GPU, which one would have to wait for
    to learn how many there are."""
    sequences: int = 1
    """Rows of each example."""
    counts: tuple[int, ...] | None = None
    """Labels of each row, where the host knows them; see `label_counts`."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers of the examples by their name, float32: [examples], or [examples, sequences]."""
    token_values: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers of the labels by their name, float32 [label tokens], row after row."""
    shared: SharedPrefixes | None = None
    """Packed: how rows with a common beginning lie in the line. None: end to end. Labels and positions of labels are
    those of the rows end to end in either case; `in_line` says where they are in the line."""
    beside: Batch | None = None
    """Rows of the same examples that `Stage.prelude` looks at, where they go through the model after these rows and
    continue their prompts (`continue_prompts`)."""

    @property
    def examples(self) -> int:
        return len(self.lengths) // self.sequences

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def slots(self) -> int:
        """Tokens of the rows with padding."""
        return self.labels.numel()

    @property
    def packed(self) -> bool:
        return self.position_ids is not None

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model. No attention mask: padding is on the right, and attention is causal, so that
        no token sees it. What keeps packed rows apart has the names of transformers' FlashAttentionKwargs; `segments`
        are the same lengths where no device has to be asked for them (core/train/attention/packed.py)."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        longest, shared = max(self.lengths), self.shared
        found = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries if shared is None else shared.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": longest if shared is None else max(shared.lengths),
            "max_length_k": longest,
            "segments": self.lengths if shared is None else shared.lengths,
        }
        return found if shared is None else found | {"key_segments": self.lengths, "key_places": shared.places}

    def row_ids(self) -> Tensor:
        """Ids of the flattened batch; packed, of all rows end to end."""
        flat = self.input_ids.flatten()
        return flat if self.shared is None else flat.index_select(0, self.shared.places)

    def in_line(self, positions: Tensor) -> Tensor:
        """Where the states of these positions are in the flattened output of the model."""
        return positions if self.shared is None else self.shared.places.index_select(0, positions) - self.shared.earlier

    def label_counts(self) -> list[int]:
        """Labels of each row."""
        if self.counts is not None:
            return list(self.counts)
        if not self.packed:
            counts: list[int] = (self.labels != IGNORE_INDEX).sum(dim=1).tolist()
            return counts
        return [int((part != IGNORE_INDEX).sum()) for part in torch.split(self.labels[0], list(self.lengths))]

    def label_positions(self) -> Tensor:
        """Where the tokens before a label are in the flattened batch, row after row: the label is at the next place."""
        if self.before_labels is not None:
            return self.before_labels
        row, column = (self.labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
        return row * self.labels.shape[1] + column

    def last_positions(self) -> Tensor:
        """Positions of the last token of each row in the flattened batch."""
        if self.packed:
            ends = list(accumulate(self.lengths))
        else:
            ends = [row * self.input_ids.shape[1] + length for row, length in enumerate(self.lengths)]
        return torch.tensor([end - 1 for end in ends]).to(self.input_ids.device, non_blocking=True)

    def to(self, device: torch.device) -> Batch:
        """On the device. A GPU's copies are queued; neither side waits for the other."""
        if self.input_ids.device == device:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

        return Batch(
            moved(self.input_ids),
            moved(self.labels),
            self.lengths,
            self.label_tokens,
            None if self.position_ids is None else moved(self.position_ids),
            None if self.boundaries is None else moved(self.boundaries),
            moved(self.label_positions()),
            self.sequences,
            self.counts,
            {name: moved(value) for name, value in self.values.items()},
            {name: moved(value) for name, value in self.token_values.items()},
            None
            if self.shared is None
            else replace(self.shared, places=moved(self.shared.places), boundaries=moved(self.shared.boundaries)),
            None if self.beside is None else self.beside.to(device),
        )


def share_prefixes(batch: Batch, firsts: Sequence[int] | None = None) -> Batch:
    """The packed batch with the tokens that a row has in common with the first row of its example, from the beginning
    on, in the line once. At least one token of each row stays its own. Results are those of the batch as it was, for
    attention that takes `shared` into account (core/train/attention). `firsts`: the row that each row is compared with,
    itself or one before it that is compared with itself; None: the first of its example."""
    assert batch.position_ids is not None
    if firsts is None:
        firsts = [row - row % batch.sequences for row in range(len(batch.lengths))]
    ids, starts = batch.input_ids[0].numpy(), [0, *accumulate(batch.lengths)]
    rows = [ids[start:end] for start, end in pairwise(starts)]
    common = [
        0 if first == row else common_prefix(rows[first], ids)
        for row, (first, ids) in enumerate(zip(firsts, rows, strict=True))
    ]
    if not any(common):
        return batch
    kept, places, at = np.ones(len(ids), dtype=np.bool_), np.empty(len(ids), dtype=np.int64), 0
    for row, (start, length, shared) in enumerate(zip(starts, batch.lengths, common, strict=False)):
        first = starts[firsts[row]]
        kept[start : start + shared] = False
        places[start : start + shared] = places[first : first + shared]
        places[start + shared : start + length] = np.arange(at, at + length - shared)
        at += length - shared
    lengths = tuple(length - shared for length, shared in zip(batch.lengths, common, strict=True))
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    own = torch.from_numpy(kept)
    return replace(
        batch,
        input_ids=batch.input_ids[:, own],
        position_ids=batch.position_ids[:, own],
        shared=SharedPrefixes(torch.from_numpy(places), lengths, boundaries),
    )


def continue_prompts(batch: Batch, beside: Batch) -> Batch:
    """`batch` with `beside`: both packed, a row of each for an example. Of a row beside are in its line only the tokens
    from the last one of its prompt on, which predicts the first label; those before it are the same in the row of
    `batch`, whose keys and values the model has by then."""
    assert batch.sequences == beside.sequences == 1 and beside.position_ids is not None
    before = torch.split(beside.label_positions(), beside.label_counts())
    starts, own_starts = [0, *accumulate(batch.lengths)], [0, *accumulate(beside.lengths)]
    common = [int(places[0]) - start if len(places) else 0 for places, start in zip(before, own_starts, strict=False)]
    lengths = tuple(length - same for length, same in zip(beside.lengths, common, strict=True))
    boundaries = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    places, kept, at = [], torch.ones(beside.tokens, dtype=torch.bool), batch.tokens
    for row, (same, own) in enumerate(zip(common, lengths, strict=True)):
        first, second = starts[row], own_starts[row]
        known, wanted = batch.input_ids[0, first : first + same], beside.input_ids[0, second : second + same]
        assert torch.equal(known, wanted), "a row beside has the prompt of its example's own row"
        places += [torch.arange(first, first + same), torch.arange(at, at + own)]
        kept[second : second + same] = False
        at += own
    continued = replace(
        beside,
        input_ids=beside.input_ids[:, kept],
        position_ids=beside.position_ids[:, kept],
        shared=SharedPrefixes(torch.cat(places), lengths, boundaries, earlier=batch.tokens),
    )
    return replace(batch, beside=continued)


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """Tokens with which both begin, fewer than either has."""
    most = min(len(one), len(other)) - 1
    differing = np.flatnonzero(one[:most] != other[:most])
    return int(differing[0]) if len(differing) else most
