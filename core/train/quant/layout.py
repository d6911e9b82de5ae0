"""The NF4 weight as bitsandbytes writes it: tables, tensors, names in a safetensors file.

A weight [N, K] is cut, row-major and across rows, into blocks of 64 elements. Each element is an index into 16 values,
two to a byte, the high nibble first. The block's largest magnitude (absmax) is itself quantised to 8 bits, in groups
of 256 blocks, after its mean (offset) is taken off: double quantisation (QLoRA, Dettmers et al. 2023,
arXiv:2305.14314).

    weight                                  uint8 [ceil(N K / 2), 1]
    weight.absmax                           uint8 [blocks]                (float32 without double quantisation)
    weight.quant_map                        float32 [16]
    weight.nested_absmax                    float32 [ceil(blocks / 256)]
    weight.nested_quant_map                 float32 [256]
    weight.quant_state.bitsandbytes__nf4    uint8, the bytes of a JSON object with everything else
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from core.errors import ModelError
from core.plan.constants import NESTED_BLOCK, NESTED_MAP, QUANT_BLOCK

STATE_KEY = "quant_state.bitsandbytes__nf4"
SUFFIXES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE_KEY)
"""What stands after `<module>.weight.` in a file, beside the packed weight itself."""

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution (QLoRA, appendix E)."""


@dataclass(frozen=True, slots=True, eq=False)
class NF4Weight:
    """A quantised weight. Without double quantisation the last three tensors are None."""

    packed: Tensor
    """uint8 [ceil(n / 2), 1]; high nibble = even element"""
    absmax: Tensor
    """uint8 [blocks], or float32 [blocks] without double quantisation"""
    nested_absmax: Tensor | None
    """float32 [ceil(blocks / 256)]"""
    nested_map: Tensor | None
    """float32 [256], the signed dynamic map"""
    offset: Tensor | None
    """float32 [], the mean absmax"""
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype of the weight before it was quantised."""
    block: int = QUANT_BLOCK

    @property
    def scales(self) -> list[Tensor]:
        """What the operators take beside the packed bytes: one tensor, or four with double quantisation."""
        if self.nested_absmax is None or self.nested_map is None or self.offset is None:
            return [self.absmax]
        return [self.absmax, self.nested_absmax, self.nested_map, self.offset]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + sum(t.nbytes for t in self.scales)

    def state(self) -> dict[str, Tensor]:
        """The tensors of a file, by their names after `<module>.`: `weight`, `weight.absmax`, …"""
        about: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": self.block,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }
        tensors = {"absmax": self.absmax, "quant_map": nf4_map(self.packed.device).clone()}
        if self.nested_absmax is not None and self.nested_map is not None and self.offset is not None:
            about |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": self.offset.item()}
            # A copy: safetensors refuses tensors that share memory, and every weight of a model has the same map.
            tensors |= {"nested_absmax": self.nested_absmax, "nested_quant_map": self.nested_map.clone()}
        tensors[STATE_KEY] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8).clone()
        return {"weight": self.packed} | {f"weight.{name}": tensor for name, tensor in tensors.items()}


def nf4_from_state(state: Mapping[str, Tensor], where: str = "weight") -> NF4Weight:
    """The inverse of `NF4Weight.state`, from files of bitsandbytes too. ModelError, with `where` in its words, when the
    tensors are of another format, or do not fit one another."""
    fp4 = "weight.quant_state.bitsandbytes__fp4"
    if fp4 in state:
        raise ModelError(f"{where} is FP4; only NF4 is read: quantise the model again as nf4", field="model")
    try:
        packed, absmax = state["weight"], state["weight.absmax"]
        about = json.loads(bytes(state[f"weight.{STATE_KEY}"].cpu().tolist()))
        shape, block = tuple(int(n) for n in about["shape"]), int(about["blocksize"])
        dtype = getattr(torch, about["dtype"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{where} is not a readable NF4 weight: {error!r}", field="model") from error
    if about.get("quant_type") != "nf4" or packed.dtype != torch.uint8:
        raise ModelError(f"{where} is {about.get('quant_type')} in {packed.dtype}, not NF4 in bytes", field="model")
    n = math.prod(shape)
    blocks = -(-n // block)
    nested = "nested_offset" in about
    wanted = {"weight": (packed, -(-n // 2)), "absmax": (absmax, blocks)}
    nested_absmax = state.get("weight.nested_absmax")
    nested_map = state.get("weight.nested_quant_map")
    if nested:
        if nested_absmax is None or nested_map is None or about["nested_blocksize"] != NESTED_BLOCK:
            raise ModelError(f"{where} lacks its second level of scales", field="model")
        wanted |= {
            "nested_absmax": (nested_absmax, -(-blocks // NESTED_BLOCK)),
            "nested_quant_map": (nested_map, NESTED_MAP),
        }
    for name, (tensor, count) in wanted.items():
        if tensor.numel() != count:
            raise ModelError(
                f"{where}: {name} has {tensor.numel()} elements, {count} belong to shape {list(shape)}", field="model"
            )
    if not torch.equal(state["weight.quant_map"].cpu().float(), nf4_map(torch.device("cpu"))):
        raise ModelError(f"{where} has a table of its own in place of NF4's", field="model")
    if not nested:
        return NF4Weight(packed.view(-1, 1), absmax.float(), None, None, None, shape, dtype, block)
    assert nested_absmax is not None and nested_map is not None
    offset = torch.tensor(float(about["nested_offset"]), dtype=torch.float32, device=packed.device)
    return NF4Weight(packed.view(-1, 1), absmax, nested_absmax.float(), nested_map.float(), offset, shape, dtype, block)


# --- tables ----------------------------------------------------------------------------------------


@cache
def nf4_map(device: torch.device) -> Tensor:
    """float32 [16]"""
    return torch.tensor(NF4_VALUES, dtype=torch.float32, device=device)


@cache
def nf4_bounds(device: torch.device) -> Tensor:
    """float32 [15]: halfway between neighbours; what lies on a bound goes down."""
    table = nf4_map(device)
    return (table[:-1] + table[1:]) / 2


@cache
def nf4_pairs(device: torch.device) -> Tensor:
    """int64 [256]: for every byte its two float32 values, side by side, so that one look-up moves both."""
    table = nf4_map(torch.device("cpu"))
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).contiguous()
    return pairs.view(torch.int64).reshape(256).to(device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """float32 [256]: the signed dynamic 8-bit map (8-bit Optimizers, Dettmers et al. 2021, arXiv:2110.02861).

    A number is a sign, a run of zeros that stands for a power of ten, and a fraction in what bits are left.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0)
        values += means.tolist() + (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)
