"""LoRA with base and adapter in one operator, in PEFT's own layers, and a merge into packed weights that counts.

PEFT makes the adapters (`get_peft_model`); `fuse_adapters` then gives each of its LoRA layers over a QuantLinear, and
on a CPU over a frozen dense layer too, this module's class. Names, state dict, saving, several adapters, scaling and
enabling stay PEFT's. What the operator does not cover (several active adapters at once, variants but DoRA, a bias in B,
mixed batches) runs in PEFT's own forward over the base: right, slower, and said once in the log where the base is
packed. DoRA over a packed base has the operator too (core/train/quant/dora.py), one layer at a time.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from core.train.kernels.autograd import Member, lora_linear, lora_linears
from core.train.kernels.padded import PLAIN, operand
from core.train.kernels.row_split import RowSplit
from core.train.quant import dora
from core.train.quant.linear import QuantLinear, compute_dtype

log = logging.getLogger("eft.train.quant")


SHARED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of siblings that decoders call one after the other on one input. They are grouped by what happens, not by the
name alone: see `SharedInput`."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """How the adapters of a model run: part of the run record."""

    fused: int
    """Number of layers whose base and adapter are one operator."""
    unfused: dict[str, int] = field(default_factory=dict)
    """Reason → layers in PEFT's own forward."""
    grouped: int = 0
    """Fused layers that share one operator with siblings over the same input."""


class SharedInput:
    """Siblings over one input: the first that is called computes all, the others take what is theirs.

    Dropout draws the same numbers as one by one, since nothing is drawn between siblings. If a sibling is called with
    another tensor than the first was, the group is dissolved, with a warning.
    """

    def __init__(self, members: list[FusedLoraLinear]) -> None:
        self.members = members
        self.dissolved = False
        self._x: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def forward(self, place: int, x: Tensor, adapter: str) -> Tensor:
        if place == 0:
            return self._all(x, adapter)
        mine, same = self._ready.pop(place, None), self._x is x
        if mine is not None and same:
            if not self._ready:
                self._x = None
            return mine
        if mine is not None:
            self.dissolved = True
            log.warning("siblings of a group were called with different inputs; they run apart from now on")
        self._forget()
        return self.members[place].alone(x, adapter)

    def _all(self, x: Tensor, adapter: str) -> Tensor:
        self._forget()
        cast = x.to(compute_dtype(x))
        taking = [(0, adapter)]
        for place, member in enumerate(self.members[1:], start=1):
            if (name := member.fused_adapter()) is not None:
                taking.append((place, name))
        operands = [self.members[place].operands(cast, name) for place, name in taking]
        splits = (m.row_split for m in self.members if m.row_split is not None)
        split = max(splits, key=lambda each: each.width, default=None)
        first, *rest = lora_linears(cast, operands) if split is None else split.lora(cast, operands)
        self._x, self._ready = x, {place: y for (place, _), y in zip(taking[1:], rest, strict=True)}
        return first

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are of the group, not of what a forward that was broken off has left in it."""
        return {**self.__dict__, "_x": None, "_ready": {}}

    def _forget(self) -> None:
        self._x = None
        self._ready.clear()


class FusedLoraLinear(PeftLinear):
    """PEFT's LoRA layer over a QuantLinear or a frozen dense layer."""

    shared: SharedInput | None = None
    place: int = 0
    """Index in the group."""
    row_split: RowSplit | None = None
    """How many rows at once, where the card has a limit (core/train/model/gemm_limits.py)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None if args or kwargs else self.fused_adapter()
        if adapter is None and not args and not kwargs and (magnified := self.dora_adapter()) is not None:
            return dora.forward(self, x, magnified, self.row_split)
        if adapter is None:
            if self.row_split is None:
                result: Tensor = super().forward(x, *args, **kwargs)
                return result
            return self.row_split.call(lambda rows: super(FusedLoraLinear, self).forward(rows, *args, **kwargs), x)
        if self.shared is None or self.shared.dissolved or torch.compiler.is_compiling():
            return self.alone(x, adapter)
        return self.shared.forward(self.place, x, adapter)

    def fused_adapter(self) -> str | None:
        """The one adapter that the fused operator takes now; None when PEFT's own forward has to run."""
        if self.disable_adapters or self.merged:
            return None
        if torch.compiler.is_compiling() and not isinstance(self.base_layer, QuantLinear):
            return None
        active = [name for name in self.active_adapters if name in self.lora_A]
        return active[0] if len(active) == 1 and why_unfused(self, active[0]) is None else None

    def dora_adapter(self) -> str | None:
        """The one adapter with magnitudes that runs over the fused operator now."""
        if self.disable_adapters or self.merged or torch.compiler.is_compiling():
            return None
        active = [name for name in self.active_adapters if name in self.lora_A]
        return active[0] if len(active) == 1 and dora.is_dora(self, active[0]) else None

    def alone(self, x: Tensor, adapter: str) -> Tensor:
        x = x.to(compute_dtype(x))
        if self.row_split is None:
            return lora_linear(x, self.operands(x, adapter))
        return self.row_split.lora(x, [self.operands(x, adapter)])[0]

    def operands(self, x: Tensor, adapter: str) -> Member:
        """What the operator takes beside x; draws the adapter's dropout."""
        base: Any = self.base_layer
        a, b = operand(self.lora_A[adapter]), operand(self.lora_B[adapter])
        dropout, scaling = self.lora_dropout[adapter], float(self.scaling[adapter])
        dropped = None if isinstance(dropout, nn.Identity) or not self.training else dropout(x)
        if not isinstance(base, QuantLinear):  # why_unfused has looked
            return Member(base.weight, (), "dense", 0, base.bias, a, b, scaling, dropped)
        return Member(base.packed, base.scales, base.format, base.block, base.bias, a, b, scaling, dropped)

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
    base = layer.base_layer
    if not isinstance(base, QuantLinear) and (type(base) is not nn.Linear or _is_trained(base)):
        return "the base is neither packed nor a frozen linear layer"
    if adapter in layer.lora_variant:
        return f"variant {type(layer.lora_variant[adapter]).__name__}"
    if layer.lora_bias[adapter]:
        return "bias in lora_B"
    if type(layer.lora_A[adapter]) not in PLAIN or type(layer.lora_B[adapter]) not in PLAIN:
        return "adapter layers of another class"
    return None


def _is_trained(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def fuse_adapters(model: nn.Module, *, dense: bool = False) -> Fusion:
    """Give every LoRA layer over a QuantLinear the fused forward and the merge that counts, and let siblings over one
    input share it. Call after `get_peft_model`, and again after adapters were added to other layers. `dense`: layers
    over a frozen nn.Linear, too."""
    fused = 0
    reasons: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, PeftLinear):
            continue
        if not isinstance(base := module.get_base_layer(), QuantLinear):
            fused += dense and _fuse_dense(module, base)
            continue
        if type(module) not in (PeftLinear, FusedLoraLinear):
            raise TypeError(f"adapters of {type(module).__name__} do not go over a packed weight")
        module.__class__ = FusedLoraLinear
        module.__dict__["shared"] = None
        active = [name for name in module.active_adapters if name in module.lora_A]
        reason = "several active adapters" if len(active) != 1 else why_unfused(module, active[0])
        if len(active) == 1 and dora.is_dora(module, active[0]):
            dora.begin(module, active[0])
            reason = None
        if reason is None:
            fused += 1
        else:
            reasons[reason] += 1
    for reason, count in reasons.items():
        log.warning("%d quantised layers run base and adapter apart: %s", count, reason)
    return Fusion(fused, dict(reasons), _group(model))


def _fuse_dense(module: PeftLinear, base: nn.Module) -> bool:
    """Whether the operator covers this layer over a dense one; it has the fused forward then."""
    if type(module) is not PeftLinear or type(base) is not nn.Linear or _is_trained(base) or module.lora_variant:
        return False
    module.__class__ = FusedLoraLinear
    return True


def _group(model: nn.Module) -> int:
    grouped = 0
    for parent in model.modules():
        for names in SHARED:
            found = [getattr(parent, name, None) for name in names]
            members = [m for m in found if isinstance(m, FusedLoraLinear)]
            if len(members) < 2 or len({m.in_features for m in members}) > 1:
                continue
            shared = SharedInput(members)
            for place, member in enumerate(members):
                member.shared, member.place = shared, place
            grouped += sum(member.fused_adapter() is not None for member in members)
    return grouped
