"""What goes through the model at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows side by side, padded on the right; or packed: all rows end to end in one line, without padding."""

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
        if not self.packed:
            counts: list[int] = (self.labels != IGNORE_INDEX).sum(dim=1).tolist()
            return counts
        return [int((part != IGNORE_INDEX).sum()) for part in torch.split(self.labels[0], list(self.lengths))]

    def to(self, device: torch.device) -> Batch:
        if self.input_ids.device == device:
            return self
        return Batch(
            self.input_ids.to(device),
            self.labels.to(device),
            self.lengths,
            self.label_tokens,
            None if self.position_ids is None else self.position_ids.to(device),
            None if self.boundaries is None else self.boundaries.to(device),
        )
