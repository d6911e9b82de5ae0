"""The batches of bench/memory.py, alone, so that a peer's process imports nothing of ours with them."""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 512


def ids_of(tokens: int, vocabulary: int, seed: int) -> Tensor:
    """Random ids [rows, tokens a row], `tokens` of them: the same for everybody who asks with the same seed."""
    rows, length = max(1, tokens // ROW), min(tokens, ROW)
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
