"""Quantised weights as torchao writes them to safetensors (https://github.com/pytorch/ao, `prototype/safetensors`).

    int8    _weight_qdata        int8 [outputs, inputs]
            _weight_scale        float32 [outputs, 1]
    int4    _weight_qdata        int8 [outputs, inputs], from -8 to 7
            _weight_scale        [outputs, inputs / group], in the 16-bit dtype of the model; float32 if trained so
    both    _weight_zero_point   int8 like the scales, 0

A weight is q * scale. The header of every file names all tensors of the model and says which class of torchao each is
of; transformers makes the weight of a layer from its pieces by what the header says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from core.train.methods.qat import RoundingGrid, steps_of

INT8_MOST = 127


@dataclass(frozen=True, slots=True)
class TorchAOLayout:
    """How the weights of linear layers are written."""

    bits: Literal[8, 4]
    group: int | None
    """Weights that share a scale; None: all of an output."""
    rounds_inputs: bool
    """Inputs of these layers are rounded to 8 bits while the model runs."""


def int8_pieces(weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A float32 weight in 8-bit integers with one float32 scale for each output, whatever the `dtype` of the model;
    tensors by their last name."""
    peak = weight.abs().amax(1, keepdim=True)
    scale = torch.where(peak > 0, peak / INT8_MOST, torch.ones_like(peak))
    return _pieces((weight / scale).round().clamp(-INT8_MOST, INT8_MOST), scale)


def int4_pieces(q: Tensor, scales: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole numbers from -8 to 7 [outputs, inputs] and their scales [outputs, groups]; tensors by their last name."""
    return _pieces(q, scales.to(dtype))


def trained_pieces(weight: Tensor, grid: RoundingGrid) -> dict[str, Tensor]:
    """A float32 weight as `quantization: qat` rounds it in training, its scales in float32: q * scale is what was
    trained, to the bit."""
    steps, scales, _ = steps_of(weight, grid)
    return _pieces(steps, scales)


def _pieces(q: Tensor, scale: Tensor) -> dict[str, Tensor]:
    zero = torch.zeros_like(scale, dtype=torch.int8)
    return {"_weight_qdata": q.to(torch.int8), "_weight_scale": scale, "_weight_zero_point": zero}


def header(inputs: Mapping[str, int | None], layout: TorchAOLayout, dtype: torch.dtype) -> dict[str, str]:
    """What the header of each file says. `inputs`: of every tensor of the model by its full name; None: it stays as it
    is."""
    of = {"_type": "torch.dtype", "_data": str(dtype).removeprefix("torch.")}
    found: dict[str, str] = {}
    for name, count in inputs.items():
        about: dict[str, Any]
        data: dict[str, Any]
        if count is None:
            about = {"_type": "Tensor"}
        elif not layout.rounds_inputs:
            data = {"act_quant_kwargs": None, "reduce_range": False, "block_size": [1, count], "dtype": of}
            about = {"_type": "Int8Tensor", "_data": data, "_tensor_data_names": ["zero_point", "qdata", "scale"]}
        else:
            target = {"_type": "torch.dtype", "_data": f"int{layout.bits}"}
            data = {"target_dtype": target, "block_size": [1, layout.group or count], "dtype": of}
            data |= {"activation_quantization": "int8_asym_per_token"}
            about = {"_type": "IntxUnpackedToInt8Tensor", "_data": data}
            about |= {"_tensor_data_names": ["qdata", "scale", "zero_point"]}
        found[name] = json.dumps(about)
    return found | {"tensor_names": json.dumps(list(inputs))}


def quantization_config(layout: TorchAOLayout, dense: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of config.json. `dense`: linear layers that stay as they are."""

    def one(kind: str, value: str) -> dict[str, Any]:
        return {"_type": kind, "_data": value}

    if not layout.rounds_inputs:
        rows = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
        data: dict[str, Any] = {"granularity": rows, "group_size": None, "set_inductor_config": True}
        kind = "Int8WeightOnlyConfig"
    else:
        shared: dict[str, Any] = {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
        if layout.group is not None:
            shared = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": layout.group}}
        data = {
            "weight_dtype": one("torch.dtype", f"int{layout.bits}"),
            "weight_granularity": shared,
            "weight_mapping_type": one("MappingType", "SYMMETRIC"),
            "weight_scale_dtype": None,
            "act_mapping_type": one("MappingType", "ASYMMETRIC"),
            "intx_packing_format": one("IntxPackingFormat", "UNPACKED_TO_INT8"),
            "intx_choose_qparams_algorithm": one("IntxChooseQParamsAlgorithm", "AFFINE"),
        }
        kind = "Int8DynamicActivationIntxWeightConfig"
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
        "modules_to_not_convert": list(dense),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
