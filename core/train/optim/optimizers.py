"""Optimizers over the trained parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, assert_never

import torch
from torch import nn

from core.spec.training import AdamW, Optimizer

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names exempt from weight decay, as `transformers.Trainer.get_decay_parameter_names` has them."""


def build_optimizer(spec: Optimizer, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """`spec.learning_rate` must be resolved. Biases and norms go into a group of their own without decay."""
    match spec:
        case AdamW():
            decay = [p for name, p in parameters.items() if not _NO_DECAY.search(name.lower())]
            exempt = [p for name, p in parameters.items() if _NO_DECAY.search(name.lower())]
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
