"""Linear layers that multiply in 8-bit floats, by torchao (https://docs.pytorch.org/ao, `torchao.float8`).

Input, weight and gradient of each product are scaled by their largest value and rounded to 8 bits, e4m3 forward and
e5m2 for gradients (Micikevicius et al. 2022, arXiv:2209.05433); the weights themselves, their gradients and everything
between the layers stay as they are. torchao takes the dialect of the card: fnuz on gfx942, OCP elsewhere. On a CPU it
is emulated, rounded operands in products of the usual kind: right, and slow. No card has run it yet.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.metadata import version
from typing import Any

from torch import nn

from core.errors import SpecError

ALIGNED = 16
"""What both sizes of a layer must be multiples of (torch._scaled_mm)."""


def installed() -> bool:
    """Whether this environment has torchao; nothing is imported, and it may be hidden (`_torchao`)."""
    return PathFinder.find_spec("torchao") is not None


def _torchao() -> Any:
    """`torchao.float8`. Until here a trainer's process says that there is none (core/train/__main__.py), so that
    transformers and PEFT leave it alone: a job that does not ask for it does not depend on it."""
    if sys.modules.get("torchao", ...) is None:
        del sys.modules["torchao"]
    return importlib.import_module("torchao.float8")


def to_fp8(model: nn.Module, *, emulate: bool) -> dict[str, Any]:
    """Swap the linear layers of a model for such, in place, but for the output head and those of odd sizes; what the
    run record says of it. SpecError when there is none. Call it before adapters are added: theirs stay as they are."""
    float8 = _torchao()
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]

    def fits(module: nn.Module, name: str) -> bool:
        return (
            type(module) is nn.Linear
            and module is not head
            and module.in_features % ALIGNED == 0
            and module.out_features % ALIGNED == 0
        )

    config = float8.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    float8.convert_to_float8_training(model, module_filter_fn=fits, config=config)
    swapped = sum(_is_fp8(module) for module in model.modules())
    if not swapped:
        raise SpecError(
            "the model has no dense linear layer whose sizes are multiples of 16: fp8 has nothing to do; take `bf16`",
            field="training.precision",
        )
    return {"layers": swapped, "of": linear, "emulated": emulate, "torchao": version("torchao")}


def dense_again(model: nn.Module) -> None:
    """The same weights in plain linear layers, in place: what is handed back needs no torchao."""
    for module in model.modules():
        if _is_fp8(module):
            module.__class__ = nn.Linear


def _is_fp8(module: nn.Module) -> bool:
    return type(module).__name__ == "Float8Linear"
