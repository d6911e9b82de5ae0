"""Groups of parameters that an optimizer treats alike, by the names of the parameters in the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn

from core.plan.optimizers import check_groups, group_of
from core.spec.axes.optim.optimizers import GroupFactors

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names exempt from weight decay, as `transformers.Trainer.get_decay_parameter_names` has them."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    names: frozenset[str]
    decays: bool
    """The optimizer's weight decay acts on it."""
    hidden: frozenset[str] = frozenset()
    """Those of `names` that are matrices of hidden layers."""
    rate_factor: float = 1.0
    """Factor of the learning rate."""
    decay_factor: float = 1.0
    """Factor of the weight decay."""


def decay_groups(model: nn.Module) -> list[ParameterGroup]:
    """Group all that requires a gradient by whether it decays: biases and norms do not."""
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    spared, hidden = without_decay(model), hidden_matrices(model)
    return [
        ParameterGroup(trained - spared, decays=True, hidden=hidden & (trained - spared)),
        ParameterGroup(trained & spared, decays=False, hidden=hidden & trained & spared),
    ]


def split(groups: Sequence[ParameterGroup], chosen: Callable[[str], bool], **factors: float) -> list[ParameterGroup]:
    """The groups without the chosen names, and beside them groups of the chosen ones, whose factors are multiplied."""
    found: list[ParameterGroup] = []
    for group in groups:
        inside = frozenset(filter(chosen, group.names))
        found.append(replace(group, names=group.names - inside, hidden=group.hidden - inside))
        scaled = {name: getattr(group, name) * factor for name, factor in factors.items()}
        found.append(replace(group, names=inside, hidden=group.hidden & inside, **scaled))
    return sorted((group for group in found if group.names), key=lambda group: group.rate_factor != 1.0)


def with_factors(groups: Sequence[ParameterGroup], asked: Sequence[GroupFactors]) -> list[ParameterGroup]:
    """The groups with the factors of `optimizer.parameter_groups`. SpecError where one of those has no parameter."""
    if not asked:
        return list(groups)
    names = sorted(name for group in groups for name in group.names)
    check_groups(asked, names)
    of = {name: group_of(name, asked) for name in names}
    found = list(groups)
    for at, one in enumerate(asked):
        found = split(
            found,
            {name for name in names if of[name] == at}.__contains__,
            rate_factor=one.learning_rate_factor,
            decay_factor=one.weight_decay_factor,
        )
    return found


def hidden_matrices(model: Any) -> frozenset[str]:
    """Names of the two-dimensional parameters that are neither an embedding nor the output head."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    kinds = (nn.Embedding, TrainableTokensLayer)
    ends = {p for module in model.modules() if isinstance(module, kinds) for p in module.parameters()}
    ends |= set(_head_of_reward_model(model)) if head is None else set(head.parameters())
    return frozenset(name for name, p in model.named_parameters() if p.dim() == 2 and p not in ends)


def _head_of_reward_model(model: Any) -> list[nn.Parameter]:
    """Parameters outside the backbone of a model without an output head for tokens."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = getattr(base, getattr(base, "base_model_prefix", ""), None)
    if not isinstance(backbone, nn.Module) or backbone is base:
        return []
    inside = set(backbone.parameters())
    return [parameter for parameter in base.parameters() if parameter not in inside]


def without_decay(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay spares, by transformers' rule: biases and norms by their names, and
    everything in an `nn.LayerNorm`, whatever its name (`ln_1` of GPT-2)."""
    by_name = {name for name, _ in model.named_parameters() if _NO_DECAY.search(name.lower())}
    by_type = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    return frozenset(by_name | by_type)
