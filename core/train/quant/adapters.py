"""LoRA over packed weights: PEFT's own layers, with the base and the adapter in one operator, and a merge that counts.

PEFT makes the adapters (`get_peft_model`); `fuse_adapters` then gives each of its LoRA layers over a QuantLinear this
module's class. Names, state dict, saving, several adapters, scaling and enabling stay PEFT's. What the operator does
not cover (several active adapters at once, DoRA and other variants, a bias in B, mixed batches) runs in PEFT's own
forward over the packed base: right, slower, and said once in the log.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from core.train.kernels.autograd import lora_linear
from core.train.quant.linear import QuantLinear, compute_dtype

log = logging.getLogger("eft.train.quant")


@dataclass(frozen=True, slots=True)
class Fusion:
    """How the adapters of a model run: part of the run record."""

    fused: int
    """Layers whose base and adapter are one operator."""
    unfused: dict[str, int] = field(default_factory=dict)
    """Reason → layers in PEFT's own forward."""


class QuantLoraLinear(PeftLinear):
    """PEFT's LoRA layer over a QuantLinear."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (args or kwargs or self.disable_adapters or self.merged):
            active = [name for name in self.active_adapters if name in self.lora_A]
            if len(active) == 1 and why_unfused(self, active[0]) is None:
                return self._fused(x, active[0])
        result: Tensor = super().forward(x, *args, **kwargs)
        return result

    def _fused(self, x: Tensor, name: str) -> Tensor:
        base = self.base_layer
        assert isinstance(base, QuantLinear)  # why_unfused has looked
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        x = x.to(compute_dtype(x))
        dropout = self.lora_dropout[name]
        dropped = None if isinstance(dropout, nn.Identity) or not self.training else dropout(x)
        return lora_linear(
            x, dropped, base.packed, base.scales, base.format, base.block, base.bias,
            a, b, float(self.scaling[name]),
        )  # fmt: skip

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put a dense 16-bit layer with the adapter added in the base's place: dequantised and added in float32,
        rounded once. The packed base is kept for `unmerge`, which is exact."""
        base = self.base_layer
        if not isinstance(base, QuantLinear):
            super().merge(safe_merge, adapter_names)
            return
        dtype = base.quantized_dtype
        self.base_layer = base.dense(torch.float32)
        try:
            super().merge(safe_merge, adapter_names)
        except BaseException:
            self.base_layer = base
            raise
        if not self.merged_adapters:
            self.base_layer = base
            return
        self.base_layer.to(dtype)
        self._packed_base = [base]  # in a list: not a submodule, so not in the state dict

    def unmerge(self) -> None:
        """The packed base again, bit for bit."""
        kept: list[QuantLinear] = self.__dict__.pop("_packed_base", [])
        if not kept:
            super().unmerge()
            return
        self.merged_adapters.clear()
        dense = self.base_layer.weight
        assert isinstance(dense, Tensor)
        self.base_layer = kept[0].to(dense.device)


def why_unfused(layer: PeftLinear, adapter: str) -> str | None:
    """Why this adapter of this layer does not run in the fused operator; None when it does."""
    if not isinstance(layer.base_layer, QuantLinear):
        return "the base is not packed"
    if adapter in layer.lora_variant:
        return f"variant {type(layer.lora_variant[adapter]).__name__}"
    if layer.lora_bias[adapter]:
        return "bias in lora_B"
    if type(layer.lora_A[adapter]) is not nn.Linear or type(layer.lora_B[adapter]) is not nn.Linear:
        return "adapter layers of another class"
    return None


def fuse_adapters(model: nn.Module) -> Fusion:
    """Give every LoRA layer over a QuantLinear the fused forward and the merge that counts. Call after
    `get_peft_model`, and again after adapters were added to other layers."""
    fused = 0
    reasons: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, PeftLinear) or not isinstance(module.get_base_layer(), QuantLinear):
            continue
        if type(module) not in (PeftLinear, QuantLoraLinear):
            raise TypeError(f"adapters of {type(module).__name__} do not go over a packed weight")
        module.__class__ = QuantLoraLinear
        active = [name for name in module.active_adapters if name in module.lora_A]
        reason = "several active adapters" if len(active) != 1 else why_unfused(module, active[0])
        if reason is None:
            fused += 1
        else:
            reasons[reason] += 1
    for reason, count in reasons.items():
        log.warning("%d quantised layers run base and adapter apart: %s", count, reason)
    return Fusion(fused, dict(reasons))
