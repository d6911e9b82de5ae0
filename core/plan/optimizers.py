"""What an optimizer keeps of each parameter that it trains: one arm each. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import assert_never

from core.errors import SpecError
from core.plan.models.shape import OF_BLOCK
from core.spec.axes.optim.optimizers import (
    SGD,
    Adafactor,
    AdaLomo,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdEMAMix,
    Apollo,
    ApolloMini,
    BAdam,
    GaLore,
    GroupFactors,
    Lion,
    Muon,
    SophiaG,
)
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
    name: str = ""
    """Name as `saved_name` gives it."""

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

    in_turn: bool = False
    """One block of the model at a time has such a state, and gradients."""

    def bytes(self, tensors: Iterable[TrainedTensor]) -> int:
        """Bytes of the state; of the largest block's, where blocks take turns."""
        found = list(tensors)
        kept = largest_block(found, self.tensor) if self.in_turn else sum(map(self.tensor, found))
        return kept + COUNTER_BYTES * sum(map(self.counts, found))

    def trained(self, tensors: Iterable[TrainedTensor]) -> int:
        """Bytes of tensors' optimizer state with their float32 weights and gradients; counters left out."""
        return sum(self.tensor(tensor) + TRAINED_BYTES * tensor.numel for tensor in tensors)


def blocks_of_names(names: Iterable[str]) -> dict[str, int]:
    """Number of each parameter's block: those of the layers in their order, then one of all that is outside."""
    found = {name: OF_BLOCK.match(name) for name in names}
    layers = sorted({(one["list"], int(one["number"])) for one in found.values() if one is not None})
    places = {layer: place for place, layer in enumerate(layers)}
    return {
        name: len(layers) if one is None else places[one["list"], int(one["number"])] for name, one in found.items()
    }


def largest_block(tensors: Sequence[TrainedTensor], size: Callable[[TrainedTensor], int]) -> int:
    """The largest sum of `size` over a block's tensors."""
    sums: Counter[int] = Counter()
    blocks = blocks_of_names(tensor.name for tensor in tensors)
    for tensor in tensors:
        sums[blocks[tensor.name]] += size(tensor)
    return max(sums.values(), default=0)


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
        case AdaLomo():
            return OptimizerState(_adafactor, "AdaLomo: means of squares by rows and columns and a counter a tensor")
        case GaLore(rank=rank):
            return OptimizerState(
                lambda t: _projected(t, rank, 0), f"GaLore: projections to {rank} dimensions, two means of those"
            )
        case Apollo(rank=rank):
            return OptimizerState(
                lambda t: _projected(t, rank, 4), f"APOLLO: projections to {rank} dimensions, two means of those"
            )
        case ApolloMini():
            return OptimizerState(
                lambda t: _projected(t, 1, 4), "APOLLO-Mini: projections to one dimension, two means of those"
            )
        case SophiaG():
            return OptimizerState(lambda t: 8 * t.numel, "Sophia-G: means of gradient and curvature in float32", _never)
        case BAdam():
            return OptimizerState(_adamw, "BAdam: two means in float32 of one block, counters", in_turn=True)
        case SGD(momentum=momentum):
            return OptimizerState(
                lambda t: 4 * t.numel if momentum else 0,
                "SGD: momentum in float32" if momentum else "SGD: nothing",
                _never,
            )
        case _ as never:
            assert_never(never)


def is_projected(shape: Sequence[int], hidden: bool, rank: int) -> bool:
    """Whether GaLore and APOLLO project a tensor's gradient."""
    return hidden and len(shape) == 2 and min(shape) > rank


def _projected(tensor: TrainedTensor, rank: int, beside: int) -> int:
    if not is_projected(tensor.shape, tensor.hidden, rank):
        return _adamw(tensor)
    return 4 * rank * (2 * max(tensor.shape) + min(tensor.shape)) + beside


def saved_name(parameter: str) -> str:
    """The name of a trained parameter as files have it, without what PEFT puts around it."""
    return parameter.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")


def group_of(parameter: str, groups: Sequence[GroupFactors]) -> int | None:
    """Number of the first group whose pattern the parameter's name matches; None: it is in none."""
    name = saved_name(parameter)
    return next((at for at, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)


def check_groups(groups: Sequence[GroupFactors], parameters: Iterable[str]) -> None:
    """SpecError for a group without a parameter."""
    names = list(parameters)
    found = {group_of(name, groups) for name in names}
    for at, group in enumerate(groups):
        if at in found:
            continue
        taken = any(fnmatchcase(saved_name(name), group.pattern) for name in names)
        why = "only matches parameters of groups before it" if taken else "matches no trained parameter"
        example = f"; a trained parameter is `{saved_name(names[0])}`" if names else ""
        raise SpecError(f"`{group.pattern}` {why}{example}", field=f"optimizer.parameter_groups[{at}].pattern")


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
