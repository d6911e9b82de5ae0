"""LoRA, QLoRA and DoRA: low-rank adapters beside frozen weights, dense or packed (Hu et al. 2021, arXiv:2106.09685),
made by PEFT."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn

from core.errors import SpecError
from core.plan.models.shape import ATTENTION
from core.spec.axes.method import LowRank
from core.train.optim.groups import ParameterGroup, decay_groups, split

_B_MATRIX = re.compile(r"\.lora_(embedding_)?B\.")
_MERGE = "leave the fields of `method` out to take that job's, or set `model.adapter: merge`"


def adapt_lora(model: nn.Module, spec: LowRank, *, autocast: bool = False) -> nn.Module:
    """Wrap `model` in a PeftModel. Adapter weights are float32 whatever the base is (PEFT's autocast_adapter_dtype),
    drawn from the torch generator. SpecError when a target module does not exist.

    `autocast`: every pass will run under autocast. Then PEFT need not cast each layer's input to the adapter's float32,
    only to have autocast cast it back: a tenth of a step on a CPU.
    """
    targets = target_modules(model, spec)
    if spec.lora_alpha is None:
        raise ValueError("the spec is not resolved: method.lora_alpha is missing")
    alpha: Any = int(spec.lora_alpha) if float(spec.lora_alpha).is_integer() else spec.lora_alpha
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.r,
        lora_alpha=alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=targets,
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        bias="none",
    )
    try:
        adapted = get_peft_model(model, config)
    except (ValueError, NotImplementedError) as error:  # of layers that PEFT has no adapter for
        raise SpecError(f"PEFT cannot adapt this model: {error}", field="method.target_modules") from error
    if autocast:
        for module in adapted.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False
    return adapted


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Put the adapter of `folder`, as PEFT has saved it, in the place of the one just made. SpecError where the two
    have other tensors or shapes."""
    saved = load_file(folder / "adapter_model.safetensors")
    made = get_peft_model_state_dict(model)
    if odd := sorted(name for name in saved.keys() | made.keys() if name not in saved or name not in made):
        where = "the adapter to continue lacks" if odd[0] in made else "this job's method has no place for"
        raise SpecError(f"{where} {odd[0]}, and {len(odd) - 1} more tensors differ; {_MERGE}", field="model.adapter")
    for name, tensor in saved.items():
        if tensor.shape != made[name].shape:
            shapes = f"{list(tensor.shape)} in the adapter to continue and {list(made[name].shape)} in this job"
            raise SpecError(f"{name} is {shapes}; {_MERGE}", field="model.adapter")
    set_peft_model_state_dict(model, saved)


def parameter_groups(model: nn.Module, spec: LowRank) -> list[ParameterGroup]:
    """The groups of an optimizer over the adapters; those of LoRA+ (arXiv:2402.12354) apart."""
    groups = decay_groups(model)
    if spec.loraplus_lr_ratio is None:
        return groups
    faster = {name for name, p in model.named_parameters() if p.dim() == 1 or _B_MATRIX.search(name)}
    return split(groups, faster.__contains__, rate_factor=spec.loraplus_lr_ratio)


def target_modules(model: nn.Module, spec: LowRank) -> str | list[str]:
    """What PEFT takes as `target_modules`."""
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    match spec.target_modules:
        case "all-linear":
            return "all-linear"
        case "attention":
            here = [name for name in ATTENTION if name in linear]
            if not here:
                raise SpecError(
                    "this model has no attention projections with a known name; list the module names instead: "
                    + ", ".join(sorted(linear)),
                    field="method.target_modules",
                )
            return here
        case names:
            known = {name for name, _ in model.named_modules()}
            for name in names:
                if not any(full == name or full.endswith("." + name) for full in known):
                    raise SpecError(
                        f"the model has no module `{name}`; its linear layers are {', '.join(sorted(linear))}",
                        field="method.target_modules",
                    )
            return names
