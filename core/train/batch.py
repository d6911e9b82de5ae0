"""What goes through the model at once: examples, each of one or more rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side, padded on the right; or packed: all rows end to end in one line, without padding. The rows of
    an example follow one another."""

    input_ids: Tensor
    """int64 [rows, tokens]; packed [1, tokens of all rows]"""
    labels: Tensor
    """int64, the same shape; IGNORE_INDEX where there is no loss, and always at the first token of a row"""
    lengths: tuple[int, ...]
    """Tokens of each row, padding not counted."""
    label_tokens: int
    """Labels that are not IGNORE_INDEX."""
    position_ids: Tensor | None = None
    """Packed: int64 [1, tokens], from 0 in each row. None: not packed."""
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

    @property
    def examples(self) -> int:
        return len(self.lengths) // self.sequences

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def slots(self) -> int:
        """Tokens with padding."""
        return self.input_ids.numel()

    @property
    def packed(self) -> bool:
        return self.position_ids is not None

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model. No attention mask: padding is on the right, and attention is causal, so that
        no token sees it. What keeps packed rows apart has the names of transformers' FlashAttentionKwargs; `segments`
        are the same lengths where no device has to be asked for them (core/train/attention/packed.py)."""
        if self.position_ids is None:
            return {"input_ids": self.input_ids}
        longest = max(self.lengths)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "cu_seq_lens_q": self.boundaries,
            "cu_seq_lens_k": self.boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
            "segments": self.lengths,
        }

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
        )
