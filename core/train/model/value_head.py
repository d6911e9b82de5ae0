"""The value head of PPO: one linear layer on the hidden states that the output head is applied to, in float32.

It is a module of the model while that is trained, so that the optimizer, checkpoints and the best weights have it as
they have all that is trained, and it is taken off before the model is handed back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from core.train.model.heads import causal_base
from core.train.optim.groups import ParameterGroup

VALUE_HEAD = "value_head"


def add_value_head(model: Any) -> ParameterGroup:
    """Add the layer, whose values are 0 until it is trained; the optimizer's group of it."""
    base = causal_base(model)
    layer = nn.Linear(base.get_output_embeddings().weight.shape[-1], 1, bias=False, dtype=torch.float32)
    nn.init.zeros_(layer.weight)
    setattr(base, VALUE_HEAD, layer)
    names = frozenset(name for name, parameter in model.named_parameters() if parameter is layer.weight)
    return ParameterGroup(names, decays=True)


def drop_value_head(model: Any) -> None:
    """Take the layer off, where the model has it."""
    base = causal_base(model)
    if hasattr(base, VALUE_HEAD):
        delattr(base, VALUE_HEAD)


def values_of(model: Any, hidden: Tensor) -> Tensor:
    """Value of each hidden state, float32 [states]. The product is in float32 under autocast, too."""
    layer: nn.Linear = getattr(causal_base(model), VALUE_HEAD)
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = nn.functional.linear(hidden.float(), layer.weight.float())
    return found.squeeze(-1)
