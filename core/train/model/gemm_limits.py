"""Matrix products within what the libraries of this card are known to do right (core/hardware/tables/faults.py,
`Limits`).

LoRA's narrow operands are padded with zeros where they must be: zero rows of A and zero columns of B add nothing, and
the gradient of what is trained is cut out of the padded one. Products of more rows than the libraries compute correctly
are made in parts (core/train/kernels/row_split.py), through the same operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear as PeftLinear
from peft.tuners.oft.layer import Linear as OftLinear
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from core.errors import SpecError
from core.hardware.tables.faults import Limits
from core.plan.memory.passes import training_pass
from core.spec.job import JobSpec
from core.train.kernels.padded import PaddedA, PaddedB, StartedA, StartedB
from core.train.kernels.row_split import RowSplit

# --- ranks -----------------------------------------------------------------------------------------------


def pad_ranks(model: nn.Module, multiple: int) -> int:
    """Let every LoRA of `model` compute with a rank that is a multiple of this; how many layers that changes. What is
    trained, saved and merged stays as it is."""
    changed = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        for name, rank in module.r.items():
            if name not in module.lora_A:  # an embedding's
                continue
            a, b = module.lora_A[name], module.lora_B[name]
            if isinstance(a, StartedA) and isinstance(b, StartedB):
                padded = -(-a.padded_rank // multiple) * multiple
                changed += padded != a.padded_rank
                a.padded_rank = b.padded_rank = padded
                continue
            if type(a) is not nn.Linear or type(b) is not nn.Linear or rank % multiple == 0:
                continue
            padded = -(-rank // multiple) * multiple
            a.__class__, b.__class__ = PaddedA, PaddedB
            a.__dict__["padded_rank"] = b.__dict__["padded_rank"] = padded
            changed += 1
    return changed


# --- rows ------------------------------------------------------------------------------------------------


def split_matmuls(model: nn.Module, limits: Limits) -> None:
    """Let every linear layer of `model`, packed or dense, with an adapter or without, keep to `limits`. Call it when
    the model is whole. Parameters, their names, state and classes stay as they are."""
    from core.train.methods.qat import QATLoraLinear
    from core.train.quant.adapters import FusedLoraLinear

    if limits.fp32_rows is None and limits.output_bytes is None:
        return
    for module in model.modules():
        match module:
            case FusedLoraLinear():  # its products are an operator's, not those of layers of its own
                module.row_split = RowSplit(limits, _larger_side(module))
            case OftLinear() | QATLoraLinear():  # the rotation is a product of its own, or all is one
                _in_parts(module, RowSplit(limits, _larger_side(module)))
            case PeftLinear() if module.lora_variant:  # DoRA multiplies with its base's weight by itself
                _in_parts(module, RowSplit(limits, _larger_side(module)))
            case nn.Linear():
                _in_parts(module, RowSplit(limits, _larger_side(module)))
            case Conv1D():
                _in_parts(module, RowSplit(limits, max(module.weight.shape)))
            case _:
                pass


def _larger_side(layer: Any) -> int:
    return max(int(layer.in_features), int(layer.out_features))


def _in_parts(module: nn.Module, parts: RowSplit) -> None:
    module.__dict__["forward"] = partial(_forward, module, parts)


def _forward(module: nn.Module, parts: RowSplit, x: Tensor, *args: Any, **more: Any) -> Tensor:
    # By the class that it has now: layers in 8-bit floats become plain ones at the end (core/train/quant/fp8.py).
    return parts.call(lambda rows: type(module).forward(module, rows, *args, **more), x)


def describe_row_splits(
    spec: JobSpec, model: nn.Module, limits: Limits, dtype: torch.dtype, longest: int, whole: bool
) -> str | None:
    """What to tell of a job whose passes are larger than `limits`; None: no pass of it is. SpecError where a product of
    them is that of no linear layer, so that `split_matmuls` does not reach it.

    `dtype`: of the products. `longest`: tokens of the longest row. `whole`: the head's logits are made whole.
    """
    tokens, field = training_pass(spec, longest)
    if limits.fp32_rows is not None and dtype is torch.float32 and tokens > limits.fp32_rows:
        _require_layers(model, field)
        return (
            f"a forward pass of {tokens:,} tokens in float32 ({field}): on this card products of more than "
            f"{limits.fp32_rows:,} rows are silently wrong (docs/hardware.md), so they are made in parts; `bf16` needs "
            "none"
        )
    if limits.output_bytes is None:
        return None
    width = widest(model, head=whole)
    size = tokens * width * dtype.itemsize
    if size <= limits.output_bytes:
        return None
    _require_layers(model, field)
    fits = limits.output_bytes // (width * dtype.itemsize)
    return (
        f"a forward pass of {tokens:,} tokens ({field}) makes a matrix of {size / (1 << 30):.1f} GiB ({width:,} wide): "
        f"on this card stores beyond {limits.output_bytes >> 30} GiB are lost (docs/hardware.md), so products of more "
        f"than {fits:,} rows are made in parts"
    )


def _require_layers(model: nn.Module, field: str) -> None:
    for name, module in model.named_modules():
        own = [] if isinstance(module, _ConvNd) else module.parameters(recurse=False)
        if any(parameter.dim() > 2 for parameter in own):
            raise SpecError(
                f"the products of {name} (fused experts) would be larger than this card's libraries compute correctly "
                "(docs/hardware.md), and cannot be made in parts; take a smaller micro-batch with more "
                "gradient_accumulation_steps",
                field=field,
            )


def widest(model: nn.Module, *, head: bool) -> int:
    """Width of the widest matrix that a linear layer makes, forwards or backwards; `head`: the output head counts."""
    skipped = None if head else model.get_output_embeddings()  # type: ignore[operator]
    sizes = [
        max(module.in_features, module.out_features) if isinstance(module, nn.Linear) else max(module.weight.shape)
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not skipped
    ]
    return max(sizes, default=0)
