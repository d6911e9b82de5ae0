"""The backend that runs wherever torch does: look-ups and products of torch itself."""

from __future__ import annotations

from torch import Tensor

from core.train.quant.int8 import dequantize_int8_into
from core.train.quant.nf4 import dequantize_nf4_into


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int) -> None:
    """See `core.train.kernels.interface`."""
    match format:
        case "nf4":
            dequantize_nf4_into(out, packed, scales, block)
        case "int8":
            dequantize_int8_into(out, packed, scales, block)
        case _:
            raise ValueError(f"unknown format {format}")
