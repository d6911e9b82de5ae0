"""Which trained parameters the device may hold in the dtype of matrix products, with the same result to the bit.

Under autocast a float32 weight of a linear layer is rounded to 16 bits before every product, and its gradient comes out
in 16 bits: a device that holds the rounded weight computes the same. Everything else computes with all 32 bits: what is
looked up (embeddings), multiplied elementwise (norms), read in ways that a layer has of its own (fused experts, states
of recurrent layers), and the output head, which the chunked loss applies to float32 states. Biases are little, and
some layers add theirs by themselves, in float32 (Mamba's time steps).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn


def narrow_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Weights of plain linear layers in the blocks that no other kind of module holds too. One that the model wants in
    float32 (transformers' `_keep_in_fp32_modules`: names of modules, or of weights) stays so."""
    from transformers.pytorch_utils import Conv1D

    inside = {module for block in blocks for module in block.modules()}
    wide = _kept_wide(model)
    narrow: set[nn.Parameter] = set()
    others: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        kept = wide is not None and wide.search(f"{name}.weight") is not None
        linear = type(module) in (nn.Linear, Conv1D) and module in inside and not kept
        for local, parameter in module._parameters.items():
            if parameter is not None:
                (narrow if linear and local == "weight" else others).add(parameter)
    return narrow - others


def _kept_wide(model: nn.Module) -> re.Pattern[str] | None:
    names: set[str] = set()
    for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
        names |= set(getattr(model, attribute, None) or ())
    return re.compile("|".join(rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in sorted(names))) if names else None
