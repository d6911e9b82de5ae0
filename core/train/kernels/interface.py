"""What a backend has to do, and which one does it. All others above it (operators, modules) know no device.

A backend fills a dense buffer from a packed weight; the matrix products around it are the platform's BLAS. For training
a product fused with the dequantisation does not pay: it is for generation with a few rows.
"""

from __future__ import annotations

from typing import Any, Literal, assert_never

import torch
from torch import Tensor

from core.train.kernels import native, portable

Format = Literal["nf4", "int8"]
Backend = Literal["portable", "native"]


def backend_for(device: torch.device) -> Backend:
    """The backend in use on a device."""
    return "native" if device.type == "cpu" and not isinstance(native.library(), str) else "portable"


def describe(device: torch.device) -> dict[str, Any]:
    """For the run record: the backend, and on a CPU why it is not the compiled one."""
    found: dict[str, Any] = {"backend": backend_for(device)}
    if device.type == "cpu" and isinstance(reason := native.library(), str):
        found["reason"] = reason
    return found


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], format: Format, block: int) -> None:
    """Fill the flat `out` [n] of float32, bfloat16 or float16 from a weight of n elements; one rounding."""
    backend = backend_for(out.device)
    if backend == "native" and not native.serves(out.dtype):
        backend = "portable"  # float16 on a CPU
    match backend:
        case "portable":
            portable.dequantize_into(out, packed, scales, format, block)
        case "native":
            native.dequantize_into(out, packed, scales, format, block)
        case _:
            assert_never(backend)
