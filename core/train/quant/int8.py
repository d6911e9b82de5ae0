"""Eight bits: one signed byte an element, one float32 scale (absmax / 127) for every 64 elements of the flat weight.

8.5 bits a weight. This is a format of our own: bitsandbytes' LLM.int8 scales whole rows and treats outliers apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import ModelError
from core.plan.constants import QUANT_BLOCK

STATE_KEY = "quant_state.eft__int8"
INT8_METHOD = "eft-int8"
"""Name of this format in a config.json (`quant_method`)."""
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    packed: Tensor
    """int8 [n, 1]"""
    absmax: Tensor
    """float32 [blocks]"""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the weight before it was quantised."""
    block: int = QUANT_BLOCK

    @property
    def scales(self) -> list[Tensor]:
        return [self.absmax]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.absmax.nbytes

    def state(self) -> dict[str, Tensor]:
        """The tensors of a file, by their names after `<module>.`."""
        about = {
            "quant_type": "int8",
            "blocksize": self.block,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }
        described = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8).clone()
        return {"weight": self.packed, "weight.absmax": self.absmax, f"weight.{STATE_KEY}": described}


def int8_from_state(state: Mapping[str, Tensor], where: str = "weight") -> Int8Weight:
    """The inverse of `Int8Weight.state`. ModelError, with `where` in its words, when the tensors do not fit."""
    try:
        about = json.loads(bytes(state[f"weight.{STATE_KEY}"].cpu().tolist()))
        shape, block = tuple(int(n) for n in about["shape"]), int(about["blocksize"])
        weight = Int8Weight(
            state["weight"].view(-1, 1), state["weight.absmax"], shape, getattr(torch, about["dtype"]), block
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{where} is not a readable int8 weight: {error!r}", field="model") from error
    n = math.prod(shape)
    if weight.packed.dtype != torch.int8 or weight.packed.numel() != n or weight.absmax.numel() != -(-n // block):
        raise ModelError(f"{where}: its tensors do not belong to shape {list(shape)}", field="model")
    return weight


def quantize_int8(weight: Tensor, block: int = QUANT_BLOCK) -> Int8Weight:
    """Round to the nearest of 255 steps between -absmax and absmax. ValueError for NaN, infinite values, or a dtype
    that is no float."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"int8 is made from float32, bfloat16 or float16, not from {weight.dtype}")
    if weight.numel() == 0:
        raise ValueError("the weight is empty")
    flat = weight.detach().reshape(-1)
    codes, scales = [], []
    for start in range(0, flat.numel(), _CHUNK):
        values = flat[start : start + _CHUNK].float()
        rows = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)
        absmax = rows.abs().amax(dim=1)
        steps = (rows * (127.0 / absmax.clamp(min=1e-30)).unsqueeze(1)).round_().clamp_(-127, 127)
        codes.append(steps.view(-1)[: values.numel()].to(torch.int8))
        scales.append(absmax)
    absmax = torch.cat(scales)
    if not torch.isfinite(absmax).all():
        raise ValueError("the weight holds NaN or infinite values")
    return Int8Weight(torch.cat(codes).unsqueeze(1), absmax, tuple(weight.shape), weight.dtype, block)


def dequantize_int8_into(out: Tensor, packed: Tensor, scales: list[Tensor], block: int) -> None:
    """Fill the flat `out` [n]."""
    n = out.numel()
    steps = scales[0] * (1.0 / 127.0)
    values = packed.reshape(-1).float()
    full = n // block * block
    values[:full].view(-1, block).mul_(steps[: full // block].unsqueeze(1))
    if full < n:
        values[full:].mul_(steps[-1])
    out.copy_(values)
