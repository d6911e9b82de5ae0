"""Optimizers over the trained parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, assert_never

import torch
from torch import nn

from core.spec.axes.optimizer import AdamW, Optimizer

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names exempt from weight decay, as `transformers.Trainer.get_decay_parameter_names` has them."""


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


def build_optimizer(spec: Optimizer, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer over `parameters`, which have their names in `model`. `spec.learning_rate` must be resolved. Biases
    and norms go into a group of their own without decay."""
    match spec:
        case AdamW():
            spared = without_decay(model)
            decay = [p for name, p in parameters.items() if name not in spared]
            exempt = [p for name, p in parameters.items() if name in spared]
            groups: list[dict[str, Any]] = [
                {"params": decay, "weight_decay": spec.weight_decay},
                {"params": exempt, "weight_decay": 0.0},
            ]
            if spec.learning_rate is None:
                raise ValueError("the spec is not resolved: optimizer.learning_rate is missing")
            return torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=spec.learning_rate,
                betas=spec.betas,
                eps=spec.eps,
                fused=True,  # one kernel over all tensors, on CPU as on GPU
            )
        case _ as never:
            assert_never(never)
