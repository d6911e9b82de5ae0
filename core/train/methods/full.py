"""Full fine-tuning: every parameter is trained."""

from __future__ import annotations

from torch import nn

from core.train.optim.groups import ParameterGroup, decay_groups


def adapt_full(model: nn.Module) -> nn.Module:
    """Give every parameter a gradient. The weights are expected in float32: in bf16 an update smaller than 1/256 of a
    weight is lost to rounding, so bf16 runs compute under autocast over float32 weights."""
    model.requires_grad_(True)
    return model


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """The groups of an optimizer over the model."""
    return decay_groups(model)
