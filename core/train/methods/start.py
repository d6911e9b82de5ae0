"""Adapters that begin with a part of their base's weights: PiSSA (Meng et al. 2024, arXiv:2404.02948) and OLoRA
(Büyükakyüz 2024, arXiv:2406.01775).

Both methods take what the adapter begins with out of the base's weights. Here the base stays as it is, dense or packed,
and the adapter adds what it has become minus what it was (core/train/kernels/padded.py): the same function, and the
same gradients. What it was is part of the model's state, so a resumed run goes on from what its first attempt began
with. The adapter that is handed back has twice the rank and loads over the original base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from core.errors import SpecError
from core.plan.models.weights import TARGETS, check_started
from core.spec.axes.method import LowRank
from core.train.kernels.padded import StartedA, StartedB, operand
from core.train.linalg.singular import largest_singular
from core.train.quant.linear import QuantLinear

NAME = "default"


@torch.no_grad()
def begin_at_base(
    model: nn.Module, spec: LowRank, device: torch.device, between: Callable[[], None] = lambda: None
) -> None:
    """Let every adapter of `model` begin with a part of its base's weight, decomposed on `device` in float32. `between`
    runs before each layer and may raise. SpecError for a layer that has no such part."""
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        between()
        if not isinstance(layer, PeftLinear):
            raise SpecError(
                f"`init_lora_weights: {spec.init_lora_weights}` decomposes the weights of linear layers, and {name} is "
                "none",
                field=TARGETS,
            )
        weight = _weight(layer).to(device)
        outputs, inputs = weight.shape
        check_started(spec, "linear", outputs, inputs, name)
        a, b = _first(weight, spec, float(layer.scaling[NAME]))
        for kept, value, started in ((layer.lora_A[NAME], a, StartedA), (layer.lora_B[NAME], b, StartedB)):
            assert type(kept) is nn.Linear
            kept.weight.copy_(value)
            kept.register_buffer("start", kept.weight.detach().clone())
            kept.__class__ = started
            kept.__dict__["padded_rank"] = 2 * spec.r


def _weight(layer: PeftLinear) -> Tensor:
    """The base's weight in float32, [outputs, inputs]."""
    base = layer.get_base_layer()
    weight: Any = base.dense(torch.float32).weight if isinstance(base, QuantLinear) else base.weight
    return weight.float().t() if layer.fan_in_fan_out else weight.float()  # type: ignore[no-any-return]


def _first(weight: Tensor, spec: LowRank, scaling: float) -> tuple[Tensor, Tensor]:
    """(A, B) that an adapter with this scaling begins with."""
    if spec.init_lora_weights == "olora":
        q, r = torch.linalg.qr(weight)
        return r[: spec.r], q[:, : spec.r]
    if spec.init_lora_weights == "pissa":
        u, s, vh = largest_singular(weight, spec.r)
    else:
        u, s, v = torch.svd_lowrank(weight, spec.r, niter=int(spec.init_lora_weights.rpartition("_")[2]))
        vh = v.t()
    root = (s / scaling).sqrt()
    return root[:, None] * vh, u * root


@torch.no_grad()
def write_out_starts(model: Any) -> None:
    """Make ordinary adapters of twice the rank of those that keep where they began: what plain PEFT loads over the
    original base."""
    changed = False
    for layer in _started(model):
        a, b = layer.lora_A[NAME], layer.lora_B[NAME]
        rank = 2 * layer.r[NAME]
        for plain, dimension in ((a, 0), (b, 1)):
            wide = operand(plain).narrow(dimension, 0, rank).contiguous()
            plain.weight = nn.Parameter(wide)
            del plain.start, plain.__dict__["padded_rank"]
            plain.__class__ = nn.Linear
        a.out_features = b.in_features = layer.r[NAME] = rank
        changed = True
    if not changed:
        return
    config = model.peft_config[NAME]
    factor = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * factor
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_alpha[NAME] = config.lora_alpha
            layer.scaling[NAME] = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _started(model: nn.Module) -> Iterator[LoraLayer]:
    for module in model.modules():
        if isinstance(module, LoraLayer) and any(isinstance(a, StartedA) for a in module.lora_A.values()):
            yield module
