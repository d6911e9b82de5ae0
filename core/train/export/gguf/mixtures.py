"""Which type each tensor of a GGUF file gets: the mixtures that llama.cpp's file types stand for (llama-quant.cpp)."""

from __future__ import annotations

import re
from collections.abc import Mapping

BASE = {"F16": "F16", "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K"}
"""Type of most tensors."""
BLOCK = {"F16": 1, "Q8_0": 32, "Q5_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
"""Weights of one block: rows are a multiple of it."""
INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_0", "Q6_K": "Q8_0", "Q5_0": "F16", "Q8_0": "F16"}
"""Type of a tensor whose rows blocks do not divide. llama-quantize takes Q5_1 in place of Q5_K; of SmolLM2's tuning a
file with Q5_1 kept 0.81 and one with Q5_0 keeps 0.98 (docs/exports.md)."""
_LAYER = re.compile(r"blk\.(\d+)\.")


def tensor_types(widths: Mapping[str, int], kind: str) -> dict[str, str]:
    """The type of each tensor in a file of type `kind`; `widths` are the lengths of the rows of all that may be
    quantised."""
    layers = 1 + max((int(found[1]) for name in widths if (found := _LAYER.match(name))), default=0)
    head = "output.weight" if "output.weight" in widths else "token_embd.weight"
    return {name: _fitting(_type(name, kind, layers, head), width) for name, width in widths.items()}


def _type(name: str, kind: str, layers: int, head: str) -> str:
    base = BASE[kind]
    if kind not in ("Q5_K_M", "Q4_K_M"):
        return base
    if name == head:
        return "Q6_K"
    found = _LAYER.match(name)
    if found is not None and ("attn_v.weight" in name or "ffn_down" in name):
        return "Q6_K" if _more_bits(int(found[1]), layers) else base
    if "attn_qkv.weight" in name:
        return "Q6_K" if kind == "Q5_K_M" else "Q5_K"
    return base


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _fitting(kind: str, width: int) -> str:
    while width % BLOCK[kind]:
        kind = INSTEAD[kind]
    return kind
