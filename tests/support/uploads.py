"""Folders of models as people upload them, written without torch."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence

Tensors = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""Shape and float32 values by name."""
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {
    "peft_type": "LORA", "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "r": 2, "lora_alpha": 4,
    "target_modules": ["q_proj"], "bias": "none", "task_type": "CAUSAL_LM",
}  # fmt: skip


def safetensors(tensors: Tensors) -> bytes:
    """The bytes of a safetensors file."""
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        raw = array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    told = json.dumps(header).encode()
    return struct.pack("<Q", len(told)) + told + data


def adapter_files(values: Sequence[float] = (0.5,) * 8, **changes: object) -> list[tuple[str, bytes]]:
    """Name and content of each file of a LoRA adapter of one layer, rank 2 and 4 inputs and outputs."""
    pair: Tensors = {
        f"{LAYER}.lora_A.weight": ((2, 4), values),
        f"{LAYER}.lora_B.weight": ((4, 2), (0.25,) * 8),
    }
    config = json.dumps(CONFIG | changes).encode()
    return [("adapter_config.json", config), ("adapter_model.safetensors", safetensors(pair))]
