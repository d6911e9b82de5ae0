"""The CPU backend in C (c_code/): compiled by the machine's own compiler at first use, and tried before it is used.

Without a compiler, or when a result differs from torch's, the portable backend does the work: said in the log and in
the run record. `EFT_KERNELS=portable` asks for that.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch
from torch import Tensor

from core.train.kernels.adamw import AdamNumbers, QuantisedMeans
from core.train.kernels.c_code import calls
from core.train.kernels.c_code.build import NativeUnavailable, load
from core.train.kernels.c_code.calls import DTYPES, LANES, LoRAFactors
from core.train.kernels.c_code.trial import try_out

log = logging.getLogger("eft.train.kernels")


@cache
def library() -> ctypes.CDLL | str:
    """The loaded kernels, or why there are none. Compiles, loads and tries them once a process."""
    try:
        loaded = load()
        try_out(loaded)
    except NativeUnavailable as reason:
        log.warning("CPU kernels run in portable torch, more slowly: %s", reason)
        return str(reason)
    return loaded


def serves(dtype: torch.dtype) -> bool:
    """Whether the kernels are there and compute in this dtype."""
    return dtype in DTYPES and not isinstance(library(), str)


# --- what they compute -----------------------------------------------------------------------------


def dequantize_into(out: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int) -> None:
    """See `core.train.kernels.interface`; to bfloat16 or float32, the same as the portable backend to the bit."""
    match format:
        case "nf4":
            calls.nf4(_ready(), out, packed, scales, block)
        case "int8":
            calls.int8(_ready(), out, packed, scales, block)
        case _:
            raise ValueError(f"unknown format {format}")


def softmax_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and Σ exp(z - maximum) of each row of bfloat16 logits [c, V], float32 [c]."""
    top = torch.empty(logits.shape[0], dtype=torch.float32)
    total = torch.empty_like(top)
    calls.softmax_stats(_ready(), top, total, logits)
    return top, total


def softmax_scale_(logits: Tensor, top: Tensor, factor: Tensor) -> None:
    """Bfloat16 logits [c, V] become factor · exp(z - top), in place; `top` and `factor` float32 [c]."""
    calls.softmax_scale_(_ready(), logits, top, factor)


def adamw_step(parameter: Tensor, gradient: Tensor, means: QuantisedMeans, numbers: AdamNumbers) -> None:
    """`core.train.kernels.adamw.quantised_step` to the bit, of contiguous float32 values on the CPU."""
    calls.adamw(_ready(), parameter, gradient, means, numbers)


def norm(out: Tensor, scale: Tensor, x: Tensor, weight: Tensor, eps: float, from_one: bool) -> None:
    """Fill `out` with the rows of x [..., n] over the root of their mean square, times the weight [n] or 1 + weight,
    and `scale` [...], float32, with what `norm_grad` needs. Here and below: contiguous, of one dtype of DTYPES."""
    calls.norm(_ready(), out, scale, x, weight, eps, from_one)


def norm_grad(grad_x: Tensor, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, from_one: bool) -> None:
    """Fill `grad_x` with the gradient of x in `norm`."""
    calls.norm_grad(_ready(), grad_x, grad, x, weight, scale, from_one)


def gate(out: Tensor, gate: Tensor, up: Tensor) -> None:
    """Fill `out` with silu(gate) · up."""
    calls.gate(_ready(), out, gate, up)


def gate_grad(grad_gate: Tensor, grad_up: Tensor, grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """Fill `grad_gate` and `grad_up` with the gradients of `gate`."""
    calls.gate_grad(_ready(), grad_gate, grad_up, grad, gate, up)


def turn(out: Tensor, x: Tensor, cosine: Tensor, sine: Tensor, back: bool) -> None:
    """Fill `out` with the rotary embedding of x [lines, tokens, heads, width] by the angles' cosines and sines, [one or
    `lines`, tokens, width]; the width is even. `back`: with the gradient of x, for the gradient x of the result."""
    calls.turn(_ready(), out, x, cosine, sine, back)


def multiplies_few_rows(width: int, block: int = LANES) -> bool:
    """Whether `wide_product` serves weights of this width, and with a `block` of 32 or more `few_rows`."""
    loaded = library()
    if isinstance(loaded, str) or not loaded.eft_few_rows():
        return False
    return width % block == 0 and block % LANES == 0


def reads_once(weight: Tensor) -> bool:
    """Whether `wide_product` takes this weight [n, k] as it lies in memory."""
    here = weight.device.type == "cpu" and weight.dtype in DTYPES and weight.is_contiguous()
    return here and multiplies_few_rows(weight.shape[1])


def few_rows(x: Tensor, packed: Tensor, scales: list[Tensor], format: str, block: int, n: int) -> Tensor:
    """x [m, k] of one of DTYPES, m at most FEW_ROWS, times a packed weight [n, k]; float32. The weight is rounded to
    the dtype of x first, as a dense copy is."""
    return calls.few_rows(_ready(), x, packed, scales, format, block, n)


def wide_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    adapter: LoRAFactors | None = None,
    narrow: bool = False,
) -> None:
    """out [m, n] = x [m, k] · weight [n, k]ᵀ + bias [n], and an adapter's product: `weight` contiguous, bfloat16 or
    float32, `out` contiguous and float32. `narrow`: without the adapter's it is rounded to bfloat16."""
    calls.wide_product(_ready(), x, weight, out, bias, adapter, narrow)


def _ready() -> ctypes.CDLL:
    loaded = library()
    if isinstance(loaded, str):
        raise RuntimeError(f"there are no C kernels: {loaded}")
    return loaded
