"""LoRA, QLoRA and DoRA: low-rank adapters beside frozen weights, dense or packed (Hu et al. 2021, arXiv:2106.09685),
made by PEFT."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from core.errors import SpecError
from core.spec.axes.method import LowRank
from core.train.base.adapters import target_modules, train_whole, whole_modules
from core.train.optim.groups import ParameterGroup, decay_groups, split
from core.train.vocabulary.rows import token_indices, train_rows

_B_MATRIX = re.compile(r"\.lora_(embedding_)?B\.")


def adapt_lora(
    model: nn.Module,
    spec: LowRank,
    *,
    autocast: bool = False,
    task: str = "CAUSAL_LM",
    head: str | None = None,
    new: Sequence[int] = (),
) -> nn.Module:
    """Wrap `model` in a PeftModel. Adapter weights are float32 whatever the base is (PEFT's autocast_adapter_dtype),
    drawn from the torch generator. SpecError when a target module does not exist.

    `autocast`: every pass will run under autocast. Then PEFT need not cast each layer's input to the adapter's float32,
    only to have autocast cast it back: a tenth of a step on a CPU. `task`: PEFT's name of what the model does. `head`:
    name of a module that is trained beside the adapters. `new`: numbers of new tokens, whose rows are trained.
    """
    targets = target_modules(model, spec)
    modules = [*whole_modules(model, spec), *([] if head is None else [head])]
    config = lora_config(spec, targets, modules, task)
    config.trainable_token_indices = token_indices(model, new)
    try:
        adapted = get_peft_model(model, config)
    except (ValueError, NotImplementedError) as error:  # of layers that PEFT has no adapter for
        raise SpecError(f"PEFT cannot adapt this model: {error}", field="method.target_modules") from error
    train_whole(adapted)
    train_rows(adapted)
    if autocast:
        leave_inputs(adapted)
    return adapted


def lora_config(
    spec: LowRank, targets: str | list[str], modules_to_save: list[str] | None = None, task: str = "CAUSAL_LM"
) -> LoraConfig:
    """PEFT's configuration of a resolved spec."""
    if spec.lora_alpha is None:
        raise ValueError("the spec is not resolved: method.lora_alpha is missing")
    alpha: Any = int(spec.lora_alpha) if float(spec.lora_alpha).is_integer() else spec.lora_alpha
    return LoraConfig(
        task_type=task,
        modules_to_save=modules_to_save or None,
        r=spec.r,
        lora_alpha=alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=targets,
        use_rslora=spec.use_rslora,
        use_dora=spec.use_dora,
        bias="none",
    )


def leave_inputs(model: nn.Module) -> None:
    """Let autocast alone cast the input of each LoRA layer."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def parameter_groups(model: nn.Module, spec: LowRank) -> list[ParameterGroup]:
    """The groups of an optimizer over the adapters; those of LoRA+ (arXiv:2402.12354) apart."""
    groups = decay_groups(model)
    if spec.loraplus_lr_ratio is None:
        return groups
    faster = {name for name, p in model.named_parameters() if p.dim() == 1 or _B_MATRIX.search(name)}
    return split(groups, faster.__contains__, rate_factor=spec.loraplus_lr_ratio)
