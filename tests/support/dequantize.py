"""Packed weights as dense tensors, by the portable arithmetic."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.train.quant.int8 import Int8Weight, dequantize_int8_into
from core.train.quant.layout import NF4Weight
from core.train.quant.nf4 import dequantize_nf4_into


def dequantize(weight: NF4Weight | Int8Weight, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the weight's shape in `dtype` (by default the dtype that was quantised), rounded once."""
    out = torch.empty(math.prod(weight.shape), dtype=dtype or weight.dtype, device=weight.packed.device)
    into = dequantize_int8_into if isinstance(weight, Int8Weight) else dequantize_nf4_into
    into(out, weight.packed, weight.scales, weight.block)
    return out.view(weight.shape)
