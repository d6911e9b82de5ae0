"""Which layers of a model are packed, and how; what cannot be, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from core.errors import ModelError
from core.plan.constants import QUANT_BLOCK
from core.train.kernels.format import Format
from core.train.quant.int8 import INT8_METHOD

SKIPPED = "named in skip_modules"


@dataclass(frozen=True, slots=True)
class QuantOptions:
    format: Format = "nf4"
    double: bool = True
    """Double quantisation (NF4)."""
    block: int = QUANT_BLOCK
    skip: tuple[str, ...] = ()
    """Further modules to leave dense: full names, or their last part."""


def already_quantised(config: Any, options: QuantOptions) -> bool:
    """True for NF4 files of bitsandbytes and for our own int8; ModelError for other formats."""
    about = getattr(config, "quantization_config", None)
    if about is None:
        return False
    about = about if isinstance(about, dict) else about.to_dict()
    method = about.get("quant_method", "an unknown method")
    if method == INT8_METHOD and options.format == "int8":
        return True
    nf4 = method == "bitsandbytes" and about.get("load_in_4bit") and about.get("bnb_4bit_quant_type") == "nf4"
    if not nf4:
        raise ModelError(
            f"the model is already quantised ({method}); only NF4 of bitsandbytes is taken as it is: name the 16-bit "
            "original instead",
            field="model",
        )
    if options.format != "nf4":
        raise ModelError(
            f"the model is already quantised as nf4 and cannot become {options.format}: ask for nf4, or name the "
            "16-bit original",
            field="quantization",
        )
    return True


def choose_targets(model: Any, options: QuantOptions) -> tuple[set[str], dict[str, str]]:
    """Names of the layers to pack; names of other linear layers with the reason."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    targets: set[str] = set()
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):
            raise ModelError(
                f"{name} is a Conv1D layer, whose weight is transposed; models of the GPT-2 kind are not quantised: "
                "train them without quantisation",
                field="quantization",
            )
        for local, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 3 and not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                raise ModelError(
                    f"{name}.{local} has {parameter.dim()} dimensions (fused experts): mixtures of experts are not "
                    "quantised yet: train without quantisation",
                    field="quantization",
                )
        if not isinstance(module, nn.Linear):
            continue
        if module is head or (embedding is not None and module.weight is embedding.weight):
            kept[name] = "output head"
        elif type(module) is not nn.Linear:
            kept[name] = f"a {type(module).__name__}"
        elif any(_is(name, skip) for skip in options.skip):
            kept[name] = SKIPPED
        else:
            targets.add(name)
    for skip in options.skip:
        if not any(_is(name, skip) for name in (*targets, *kept)):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in (*targets, *kept)}))
            raise ModelError(
                f"the model has no linear layer `{skip}` to leave dense; its linear layers are {known}",
                field="quantization.skip_modules",
            )
    if not targets:
        raise ModelError("the model has no linear layer to quantise", field="quantization")
    return targets, kept


def _is(name: str, asked: str) -> bool:
    """Full names, or their last part."""
    return name == asked or name.endswith("." + asked)
