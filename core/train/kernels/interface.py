"""What a backend has to do, and which one does it. All others above it (operators, modules) know no device.

A backend fills a dense buffer from a packed weight; the matrix products around it are the platform's BLAS. For training
a product fused with the dequantisation does not pay: it is for generation with a few rows.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch import Tensor

from core.train.kernels import portable

Format = Literal["nf4", "int8"]
Backend = Literal["portable"]


def backend_for(device: torch.device) -> Backend:
    """The backend in use on a device: part of the run record."""
    return "portable"


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], format: Format, block: int) -> None:
    """Fill the flat `out` [n] of float32, bfloat16 or float16 from a weight of n elements; one rounding."""
    backend = backend_for(out.device)
    match backend:
        case "portable":
            portable.dequantize_into(out, packed, scales, format, block)
        case _:
            assert_never(backend)
