"""NEFTune: uniform noise on the embeddings while training (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def add_noise(model: Any, alpha: float) -> Any:
    """Let the input embeddings of `model` answer with noise in training mode, drawn from the torch generator of their
    device; the handle of the hook."""
    embeddings: nn.Module = model.get_input_embeddings()
    return embeddings.register_forward_hook(partial(_noisy, alpha))


def _noisy(alpha: float, embeddings: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Rows of a batch have its padded length, as in transformers (`neftune_post_forward_hook`)."""
    if not embeddings.training:
        return output
    size = alpha / math.sqrt(output.shape[1] * output.shape[2])
    return output + torch.zeros_like(output).uniform_(-size, size)
