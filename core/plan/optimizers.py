"""What an optimizer keeps of each parameter that it trains: one arm each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from core.spec.axes.optimizer import AdamW, Optimizer

TRAINED_BYTES = 8
"""Float32 weight and gradient of a parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Bytes that an optimizer keeps beside weights and gradients."""

    parameter: int
    """Bytes for each parameter."""
    tensor: int
    """Bytes for each tensor of parameters."""
    kept: str
    """What is in it, for people."""

    def bytes(self, parameters: int, tensors: int) -> int:
        return self.parameter * parameters + self.tensor * tensors

    @property
    def trained(self) -> int:
        """Bytes for each parameter with its float32 weight and gradient."""
        return TRAINED_BYTES + self.parameter


def state_of(optimizer: Optimizer) -> OptimizerState:
    match optimizer:
        case AdamW():
            return OptimizerState(8, 4, "AdamW: two means in float32 and a counter a tensor")
        case _ as never:
            assert_never(never)
