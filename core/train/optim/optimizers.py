"""Optimizers over the trained parameters. What each keeps of a parameter is in core/plan/optimizers.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import torch
from torch import nn

from core.spec.axes.optimizer import AdamW, Optimizer
from core.train.optim.groups import ParameterGroup


def build_optimizer(
    spec: Optimizer, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer over `parameters`, by the groups that their names are in. `spec.learning_rate` must be resolved."""
    if spec.learning_rate is None:
        raise ValueError("the spec is not resolved: optimizer.learning_rate is missing")
    members = [(group, [p for name, p in parameters.items() if name in group.names]) for group in groups]
    match spec:
        case AdamW():
            return torch.optim.AdamW(
                [
                    {"params": params, "weight_decay": spec.weight_decay if group.decays else 0.0}
                    for group, params in members
                    if params
                ],
                lr=spec.learning_rate,
                betas=spec.betas,
                eps=spec.eps,
                fused=True,  # one kernel over all tensors, on CPU as on GPU
            )
        case _ as never:
            assert_never(never)
