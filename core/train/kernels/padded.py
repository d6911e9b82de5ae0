"""LoRA's A and B padded with zeros, for cards whose libraries compute narrow operands wrongly.

Zero rows of A and zero columns of B add nothing, and the gradient of what is trained is cut out of the padded one.
"""

from __future__ import annotations

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


PLAIN = (nn.Linear, PaddedA, PaddedB)
"""Classes of A and B whose `operand` says all there is to them."""


def operand(layer: nn.Module) -> Tensor:
    """The matrix that products with this A or B take: its weight, padded with zeros where it is one of the above."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    match layer:
        case PaddedA():
            return functional.pad(weight, (0, 0, 0, layer.padded_rank - weight.shape[0]))
        case PaddedB():
            return functional.pad(weight, (0, layer.padded_rank - weight.shape[1]))
        case _:
            return weight
