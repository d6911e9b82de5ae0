"""What goes through the model at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that carries no loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows."""

    input_ids: Tensor
    """int64 [rows, tokens]"""
    labels: Tensor
    """int64 [rows, tokens]; IGNORE_INDEX where there is no loss, and always at position 0"""
    lengths: tuple[int, ...]
    """Tokens of each row, padding not counted."""
    label_tokens: int
    """Labels that are not IGNORE_INDEX."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def slots(self) -> int:
        """Tokens with padding."""
        return self.input_ids.numel()

    def to(self, device: torch.device) -> Batch:
        if self.input_ids.device == device:
            return self
        return Batch(self.input_ids.to(device), self.labels.to(device), self.lengths, self.label_tokens)
