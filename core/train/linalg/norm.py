"""The norm of all gradients together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LONG = 1 << 20
"""Numbers of a tensor from which torch's norm on a CPU is no longer exact enough."""
ROW = 4096


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Global L2 norm of the gradients: a scalar on the device of the first.

    On a CPU torch adds the squares of a tensor up in a few float32 lanes. For a million numbers its norm is 1e-5 too
    small, for the 59 million of a feed-forward weight of an 8B model 0.45 %, for 131 million 1.3 % (torch 2.13). Long
    tensors in host memory are therefore summed row by row; all others as `torch.nn.utils.get_total_norm` does.
    """
    if not any(_is_long(gradient) for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = [_by_rows(gradient) if _is_long(gradient) else torch.linalg.vector_norm(gradient) for gradient in gradients]
    whole: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
    return whole


def _is_long(gradient: Tensor) -> bool:
    return gradient.device.type == "cpu" and gradient.numel() >= LONG


def _by_rows(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    whole = flat.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat((rows, rest.view(1))))
    return norm
