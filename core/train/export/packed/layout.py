"""Quantised weights as compressed-tensors writes them (https://github.com/vllm-project/compressed-tensors).

    fp8     weight          float8_e4m3fn [outputs, inputs]
            weight_scale    [outputs, 1]
    int4    weight_packed   int32 [outputs, inputs / 8]: q + 8 in four bits each, the first input in the lowest
            weight_scale    [outputs, inputs / group]
            weight_shape    int64 [2]

A weight is q * scale. Scales have the 16-bit dtype of the model; they are rounded to it before the weights are divided
by them, so that their rounding is no error of the result.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

E4M3_MOST = 448.0
"""Largest number of OCP E4M3."""
GROUPS = (128, 64, 32)
"""Weights that may share a scale, best served first; vLLM's kernels take these."""
LEAST, MOST = -8, 7


def fp8_pieces(weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A float32 weight in 8-bit floats with one scale for each output; tensors by their last name."""
    peak = weight.abs().amax(1, keepdim=True)
    scale = torch.where(peak > 0, peak / E4M3_MOST, torch.ones_like(peak)).to(dtype)
    values = (weight / scale.float()).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}


def int4_pieces(q: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole numbers from -8 to 7 [outputs, inputs] and their scales [outputs, groups]; tensors by their last name."""
    rows, columns = q.shape
    nibbles = (q.to(torch.int32) - LEAST).view(rows, columns // 8, 8)
    packed = (nibbles << (4 * torch.arange(8, dtype=torch.int32))).sum(-1, dtype=torch.int64)
    words = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {"weight_packed": words, "weight_scale": scales.to(dtype), "weight_shape": torch.tensor([rows, columns])}


def group_of(inputs: Collection[int]) -> int | None:
    """The size of a group that divides the inputs of every layer; None: there is none."""
    return next((group for group in GROUPS if all(count % group == 0 for count in inputs)), None)


def quantization_config(kind: str, group: int | None, dense: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. `dense`: linear layers that stay as they are."""
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None
    if kind == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        layout = "float-quantized"
    else:
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
        weights |= {"symmetric": True, "dynamic": False}
        layout = "pack-quantized"
    rule = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": rule},
        "ignore": list(dense),
    }
