"""A base model as it was while an adapter was trained over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.spec.axes.quantization import NF4, FrozenFormat, Int8
from core.train.model.load import load_model, packed_as
from core.train.quant.model import load_quantized
from core.train.quant.targets import QuantOptions


def load_as_trained(base: Path, dtype: Any, quantization: FrozenFormat | None) -> Any:
    """A causal model on the CPU, its weights packed as while an adapter was trained over them."""
    match quantization:
        case NF4(double=double, skip_modules=skip):
            options = QuantOptions(format="nf4", double=double, skip=tuple(skip))
        case Int8(block_size=block, skip_modules=skip):
            options = QuantOptions(format="int8", block=block, skip=tuple(skip))
        case _ if packed_as(base) is not None:
            options = QuantOptions(format="nf4")
        case _:
            return load_model(base, dtype)
    return load_quantized(base, dtype, options)[0]
