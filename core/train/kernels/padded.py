"""LoRA's A and B in products that differ from their weights: padded with zeros, or taken from where they began.

Padded: for cards whose libraries compute narrow operands wrongly. Zero rows of A and zero columns of B add nothing, and
the gradient of what is trained is cut out of the padded one.

From a start: an adapter that begins at A0 and B0 adds BA - B0A0, which is nothing at first. As [B - B0, B0] [A; A - A0]
it is one product of twice the rank, in which no large terms cancel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PaddedA(nn.Linear):
    """A LoRA's A [r, K], used as if it had `padded_rank` rows."""

    padded_rank: int

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, operand(self), self.bias)


class PaddedB(nn.Linear):
    """A LoRA's B [N, r], used as if it had `padded_rank` columns."""

    padded_rank: int

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, operand(self), self.bias)


class StartedA(nn.Linear):
    """A LoRA's A [r, K], used as [A; A - start], with zeros up to `padded_rank` rows."""

    padded_rank: int
    start: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, operand(self), self.bias)


class StartedB(nn.Linear):
    """A LoRA's B [N, r], used as [B - start, start], with zeros up to `padded_rank` columns."""

    padded_rank: int
    start: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, operand(self), self.bias)


PLAIN = (nn.Linear, PaddedA, PaddedB, StartedA, StartedB)
"""Classes of A and B whose `operand` says all there is to them."""


def operand(layer: nn.Module) -> Tensor:
    """The matrix that products with this A or B take: its weight, unless it is one of the above."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    match layer:
        case PaddedA():
            return functional.pad(weight, (0, 0, 0, layer.padded_rank - weight.shape[0]))
        case PaddedB():
            return functional.pad(weight, (0, layer.padded_rank - weight.shape[1]))
        case StartedA():
            both = torch.cat((weight, weight - layer.start))
            return functional.pad(both, (0, 0, 0, layer.padded_rank - both.shape[0]))
        case StartedB():
            both = torch.cat((weight - layer.start, layer.start), dim=1)
            return functional.pad(both, (0, layer.padded_rank - both.shape[1]))
        case _:
            return weight
