"""Optimizers over the trained parameters. What each keeps of a parameter is in core/plan/optimizers.py.

State is tensors for each parameter and nothing else, so that every optimizer resumes to the bit and steps any part of
the parameters alone (core/train/memory/offload).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import torch
from torch import nn

from core.plan.optimizers import BLOCK_4BIT, BLOCK_8BIT, blocks_of_names, is_projected
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
    Lion,
    Muon,
    SophiaG,
)
from core.spec.axes.optimizer import Optimizer
from core.train.optim.blocks import BlockAdamW
from core.train.optim.factored import AdafactorOptimizer, AdaLomoOptimizer
from core.train.optim.groups import ParameterGroup, with_factors
from core.train.optim.momentum import LionOptimizer, SlowMeanAdamW, SophiaOptimizer
from core.train.optim.pair import OptimizerPair
from core.train.optim.projected import Kind, ProjectedAdamW
from core.train.optim.quantised import QuantisedAdamW, maps_4bit, maps_8bit


def build_optimizer(
    spec: Optimizer, groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer over `parameters`, by the groups that their names are in. `spec.learning_rate` must be resolved."""
    if spec.learning_rate is None:
        raise ValueError("the spec is not resolved: optimizer.learning_rate is missing")
    members = [
        {
            "params": [p for name, p in parameters.items() if name in group.names],
            "weight_decay": spec.weight_decay * group.decay_factor if group.decays else 0.0,
            "lr": spec.learning_rate * group.rate_factor,
        }
        for group in with_factors(groups, spec.parameter_groups)
    ]
    members, rate = [group for group in members if group["params"]], spec.learning_rate
    match spec:
        case AdamW8bit():
            maps = maps_8bit
            return QuantisedAdamW(members, rate, spec.betas, spec.eps, bits=8, block=BLOCK_8BIT, maps=maps)
        case AdamW4bit():
            maps = maps_4bit
            return QuantisedAdamW(members, rate, spec.betas, spec.eps, bits=4, block=BLOCK_4BIT, maps=maps)
        case AdamW():
            return _adamw(members, rate, spec)
        case AdEMAMix():
            return SlowMeanAdamW(members, rate, spec.betas, spec.alpha, spec.warmup_steps, spec.eps)
        case Lion():
            return LionOptimizer(members, rate, spec.betas)
        case Muon():
            matrices, rest = _split(members, _hidden(groups, parameters))
            if not matrices:
                return _adamw(rest, rate, spec)
            muon = torch.optim.Muon(
                matrices,
                lr=rate,
                momentum=spec.momentum,
                nesterov=spec.nesterov,
                ns_steps=spec.ns_steps,
                adjust_lr_fn=spec.adjust_lr_fn,
            )
            return OptimizerPair(muon, _adamw(rest, rate, spec)) if rest else muon
        case AdaLomo():
            return AdaLomoOptimizer(
                members, rate, decay=spec.decay_rate, eps=spec.eps, clip_threshold=spec.clip_threshold
            )
        case SophiaG():
            return SophiaOptimizer(members, rate, spec.betas, spec.rho, spec.eps, spec.update_period)
        case BAdam():
            blocks = blocks_of_names(parameters)
            return BlockAdamW(
                members,
                rate,
                spec.betas,
                spec.eps,
                blocks={parameter: blocks[name] for name, parameter in parameters.items()},
                every=spec.switch_block_every,
                order=spec.switch_mode,
            )
        case GaLore(rank=rank):
            return _projected(members, rate, spec, "galore", rank, _hidden(groups, parameters))
        case Apollo(rank=rank):
            return _projected(members, rate, spec, "apollo", rank, _hidden(groups, parameters))
        case ApolloMini():
            return _projected(members, rate, spec, "apollo_mini", 1, _hidden(groups, parameters))
        case Adafactor():
            return AdafactorOptimizer(
                members, lr=rate, beta2_decay=spec.beta2_decay, eps=spec.eps, d=spec.clip_threshold
            )
        case SGD():
            return torch.optim.SGD(members, lr=rate, momentum=spec.momentum, nesterov=spec.nesterov, fused=True)
        case _ as never:
            assert_never(never)


def _adamw(members: list[dict[str, Any]], rate: float, spec: AdamW | Muon) -> torch.optim.AdamW:
    # fused: one kernel over all tensors, on CPU as on GPU
    return torch.optim.AdamW(members, lr=rate, betas=spec.betas, eps=spec.eps, fused=True)


def _projected(
    members: list[dict[str, Any]],
    rate: float,
    spec: GaLore | Apollo | ApolloMini,
    kind: Kind,
    rank: int,
    hidden: set[nn.Parameter],
) -> ProjectedAdamW:
    matrices, rest = _split(members, {p for p in hidden if is_projected(p.shape, True, rank)})
    marked = [group | {"rank": rank} for group in matrices]
    return ProjectedAdamW(
        [*marked, *rest], rate, spec.betas, spec.eps, kind=kind, gap=spec.update_proj_gap, scale=spec.scale
    )


def _hidden(groups: Sequence[ParameterGroup], parameters: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """Matrices of hidden layers."""
    return {p for name, p in parameters.items() if any(name in group.hidden for group in groups)}


def _split(
    members: list[dict[str, Any]], chosen: set[nn.Parameter]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups with their chosen parameters alone, and with all others."""
    inside = [group | {"params": [p for p in group["params"] if p in chosen]} for group in members]
    outside = [group | {"params": [p for p in group["params"] if p not in chosen]} for group in members]
    return [group for group in inside if group["params"]], [group for group in outside if group["params"]]
