"""What an optimizer keeps of each parameter that it trains: one arm each. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from core.spec.axes.optim.optimizers import SGD, Adafactor, AdamW, AdamW4bit, AdamW8bit, AdEMAMix, Lion, Muon
from core.spec.axes.optimizer import Optimizer

TRAINED_BYTES = 8
"""Float32 weight and gradient of a parameter."""
COUNTER_BYTES = 4
"""The counter of steps that most optimizers keep for each tensor."""
QUANTISED_FROM = 4096
"""Parameters of the smallest tensor whose means are quantised."""
BLOCK_8BIT, BLOCK_4BIT = 256, 128
"""Values that share a scale."""


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """A trained tensor, as far as optimizers care."""

    shape: tuple[int, ...]
    hidden: bool
    """A matrix of a hidden layer: neither embedding nor output head."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer keeps beside weights and gradients."""

    tensor: Callable[[TrainedTensor], int]
    """Bytes for a tensor, without its counter."""
    kept: str
    """What is in it, for people."""
    counts: Callable[[TrainedTensor], bool] = lambda tensor: True
    """Whether a tensor has a counter of steps."""

    def bytes(self, tensors: Iterable[TrainedTensor]) -> int:
        return sum(self.tensor(tensor) + COUNTER_BYTES * self.counts(tensor) for tensor in tensors)

    def trained(self, tensors: Iterable[TrainedTensor]) -> int:
        """Bytes of tensors' optimizer state with their float32 weights and gradients; counters left out."""
        return sum(self.tensor(tensor) + TRAINED_BYTES * tensor.numel for tensor in tensors)


def state_of(optimizer: Optimizer) -> OptimizerState:
    match optimizer:
        case AdamW8bit():
            return OptimizerState(
                lambda t: _quantised(t, 8, BLOCK_8BIT), "AdamW: two means in 8 bits, scales, counters"
            )
        case AdamW4bit():
            return OptimizerState(
                lambda t: _quantised(t, 4, BLOCK_4BIT), "AdamW: two means in 4 bits, scales, counters"
            )
        case AdamW():
            return OptimizerState(_adamw, "AdamW: two means in float32 and a counter a tensor")
        case AdEMAMix():
            return OptimizerState(lambda t: 12 * t.numel, "AdEMAMix: three means in float32 and a counter a tensor")
        case Lion():
            return OptimizerState(lambda t: 4 * t.numel, "Lion: a mean in float32", _never)
        case Muon():
            return OptimizerState(
                lambda t: 4 * t.numel if t.hidden else _adamw(t),
                "Muon: momentum of hidden matrices in float32; AdamW's state of the rest",
                lambda t: not t.hidden,
            )
        case Adafactor():
            return OptimizerState(_adafactor, "Adafactor: means of squares by rows and columns and a counter a tensor")
        case SGD(momentum=momentum):
            return OptimizerState(
                lambda t: 4 * t.numel if momentum else 0,
                "SGD: momentum in float32" if momentum else "SGD: nothing",
                _never,
            )
        case _ as never:
            assert_never(never)


def _never(tensor: TrainedTensor) -> bool:
    return False


def _adamw(tensor: TrainedTensor) -> int:
    return 8 * tensor.numel


def _quantised(tensor: TrainedTensor, bits: int, block: int) -> int:
    if tensor.numel < QUANTISED_FROM:
        return _adamw(tensor)
    return 2 * (-(-tensor.numel * bits // 8) + 4 * -(-tensor.numel // block))


def _adafactor(tensor: TrainedTensor) -> int:
    if len(tensor.shape) < 2:
        return 4 * tensor.numel
    *_, rows, columns = tensor.shape
    return 4 * (tensor.numel // rows + tensor.numel // columns)
