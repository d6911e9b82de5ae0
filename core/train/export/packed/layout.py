"""Quantised weights as compressed-tensors writes them (https://github.com/vllm-project/compressed-tensors).

    fp8     weight          float8_e4m3fn [outputs, inputs]
            weight_scale    [outputs, 1]
    int4    weight_packed   int32 [outputs, inputs / 8]: q + 8 in four bits each, the first input in the lowest
            weight_scale    [outputs, inputs / group]
            weight_shape    int64 [2]
    mxfp4   weight_packed   uint8 [outputs, inputs / 2]: two numbers of E2M1, the first in the lower four bits
            weight_scale    uint8 [outputs, inputs / 32]: exponent of a power of two plus 127

A weight is q * scale. Scales have the 16-bit dtype of the model; they are rounded to it before the weights are divided
by them, so that their rounding is no error of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.train.hub.unpack import formats

E4M3_MOST = 448.0
"""Largest number of OCP E4M3."""
GROUPS = (128, 64, 32)
"""Weights that may share a scale, best served first; vLLM's kernels take these."""
LEAST, MOST = -8, 7
SHRINK = tuple(1 - 0.03 * step for step in range(11))
"""Scales of int4 that are tried, as shares of the one that clips nothing."""
MX_GROUP = 32
MX_BIAS = 127
MX_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Between the numbers of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a weight can be, before its scale."""

    nearest: Callable[[Tensor], Tensor]
    """The nearest of them, for each float32 value."""
    scales: Callable[[Tensor, torch.dtype], Iterable[Tensor]]
    """Scales to be tried for groups with these largest weights, which must not be 0."""


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


def mxfp4_pieces(q: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Numbers of E2M1 [outputs, inputs] and scales [outputs, groups], powers of two; tensors by their last name."""
    codes = torch.bucketize(q.abs(), MX_TIES).to(torch.uint8) | (q.signbit().to(torch.uint8) << 3)
    return {
        "weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4),
        "weight_scale": (scales.log2().round() + MX_BIAS).to(torch.uint8),
    }


def _e2m1(values: Tensor) -> Tensor:
    found = torch.tensor(formats.E2M1)[torch.bucketize(values.abs(), MX_TIES)]
    return found.copysign(values)


def _powers_of_two(widest: Tensor, dtype: torch.dtype) -> Iterable[Tensor]:
    """The one that clips nothing, and the next smaller one. Numbers of 16 bits hold both in their range."""
    exponent = (widest / 6).log2().ceil().clamp(-MX_BIAS + 1, MX_BIAS)
    return torch.exp2(exponent), torch.exp2((exponent - 1).clamp(min=-MX_BIAS + 1))


INT4 = Grid(
    lambda values: values.round().clamp(LEAST, MOST),
    lambda widest, dtype: ((widest / ((MOST - LEAST) / 2) * share).to(dtype).float() for share in SHRINK),
)
E2M1 = Grid(_e2m1, _powers_of_two)


def group_of(inputs: Collection[int], sizes: Sequence[int] = GROUPS) -> int | None:
    """The first of these sizes of a group that divides the inputs of every layer; None: there is none."""
    return next((group for group in sizes if all(count % group == 0 for count in inputs)), None)


def quantization_config(kind: str, group: int | None, dense: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. `dense`: linear layers that stay as they are."""
    weights: dict[str, Any]
    activations: dict[str, Any] | None = None
    if kind == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        activations = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
        layout = "float-quantized"
    elif kind == "mxfp4":
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_GROUP}
        weights |= {"symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        layout = "mxfp4-pack-quantized"
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
