"""Products of a few rows with dense weights on a CPU, as each step of generation makes them.

torch's product copies the whole weight into another order before it multiplies, which few rows do not pay for. The C
kernel (core/train/kernels/c_code/few_rows.c) reads the weight once, as it lies in memory, and adds LoRA's own products
on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional

from core.train.kernels import native
from core.train.kernels.c_code.calls import LANES, LoRAFactors
from core.train.kernels.interface import backend_for

ROWS = 32
"""Rows up to which the C kernel is quicker than torch: 1.3 times with 32, twice with 8 (float32; bfloat16 more)."""
LEAST = 1 << 15
"""Numbers of a weight below which calling the kernel takes longer than it saves."""


def reads_once(weight: Tensor, rows: int) -> bool:
    """Whether the kernel multiplies so many rows by this weight, [n, k], as it lies in memory."""
    here = rows <= ROWS and weight.numel() >= LEAST and backend_for(weight.device, "gemv") == "native"
    return here and native.reads_once(weight)


@contextmanager
def few_rows(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, linear layers of `model` multiply a few rows by the C kernel, where this machine has it. Weights do not
    change, and nothing needs gradients. Sums are float32; operands and results are rounded as they are without it."""
    replaced: list[nn.Module] = []
    try:
        if backend_for(device, "gemv") == "native":
            for module in model.modules():
                if type(module) in (nn.Linear, LoraLinear) and "forward" not in module.__dict__:
                    quick = _Quick(module)
                    if quick.plain():
                        module.__dict__["forward"] = quick
                        replaced.append(module)
        yield
    finally:
        for module in replaced:
            del module.__dict__["forward"]


class _Quick:
    """The forward pass of a layer, by the kernel where it can be."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._linear: Any = module.base_layer if isinstance(module, LoraLinear) else module
        self._adapters: dict[torch.dtype | None, LoRAFactors | None] = {}
        """The active one as it is under autocast to a dtype, or without; None: there is none."""

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight, autocast = self._linear.weight, torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
        rows = x.numel() // x.shape[-1]
        if args or kwargs or weight.dtype is not dtype or not reads_once(weight, rows):
            return type(self._module).forward(self._module, x, *args, **kwargs)  # type: ignore[no-any-return]
        key = dtype if autocast else None
        if key not in self._adapters:
            self._adapters[key] = self._adapter(key)
        out = torch.empty(rows, weight.shape[0])
        narrow, adapter = dtype is torch.bfloat16, self._adapters[key]
        native.wide_product(
            x.reshape(rows, -1).to(dtype), weight, out, bias=self._linear.bias, adapter=adapter, narrow=narrow
        )
        return out.to(dtype).view(*x.shape[:-1], -1)

    def plain(self) -> bool:
        """Whether the layer computes its own product and at most one adapter's, and nothing else."""
        module, linear = self._module, self._linear
        if module is linear:
            return True
        biased = any(layer.bias is not None for layer in module.lora_B.values())
        dropout = any(layer.training and layer.p for layer in module.lora_dropout.values() if hasattr(layer, "p"))
        hooked = type(linear) is not nn.Linear or linear._forward_pre_hooks or linear._forward_hooks
        return not (hooked or module.merged or module.lora_variant or biased or dropout or len(self._active()) > 1)

    def _active(self) -> list[str]:
        module = self._module
        if module is self._linear or module.disable_adapters:
            return []
        return [name for name in module.active_adapters if name in module.lora_A]

    def _adapter(self, rounded: torch.dtype | None) -> LoRAFactors | None:
        for name in self._active():
            a, b = self._module.lora_A[name].weight, self._module.lora_B[name].weight
            if rounded is not None:
                a, b = a.to(rounded), b.to(rounded)
            more = -len(a) % LANES
            a, b = functional.pad(a.float(), (0, 0, 0, more)), functional.pad(b.float(), (0, more))
            scale = float(self._module.scaling[name])
            return LoRAFactors(a.contiguous(), b.contiguous(), scale, narrow=rounded is torch.bfloat16)
        return None
