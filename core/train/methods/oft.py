"""Orthogonal fine-tuning: rotations of the inputs of frozen layers, dense or packed (Qiu et al. 2023,
arXiv:2306.07280), made by PEFT."""

from __future__ import annotations

from peft import OFTConfig, get_peft_model
from torch import nn

from core.errors import SpecError
from core.spec.axes.method import OFT
from core.train.base.adapters import target_modules, train_whole, whole_modules
from core.train.optim.groups import ParameterGroup, decay_groups


def adapt_oft(model: nn.Module, spec: OFT, *, task: str = "CAUSAL_LM", head: str | None = None) -> nn.Module:
    """Wrap `model` in a PeftModel whose rotations are float32 and begin as none. SpecError when a target module does
    not exist or its inputs cannot be divided into the blocks, which PEFT would make of another size. `task`: PEFT's
    name of what the model does. `head`: name of a module that is trained beside the rotations."""
    config = OFTConfig(
        task_type=task,
        modules_to_save=[*whole_modules(model, spec), *([] if head is None else [head])] or None,
        r=spec.r or 0,
        oft_block_size=0 if spec.r is not None else spec.oft_block_size or 32,
        target_modules=target_modules(model, spec),
        use_cayley_neumann=spec.use_cayley_neumann,
        bias="none",
    )
    sizes = {name: int(module.in_features) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    try:
        adapted = get_peft_model(model, config)
    except (TypeError, ValueError, NotImplementedError) as error:  # of layers that PEFT has no rotation for
        raise SpecError(f"PEFT cannot adapt this model: {error}", field="method.target_modules") from error
    for name in adapted.targeted_module_names:
        if spec.block_of(sizes[name]) is None:
            field = "method.r" if spec.r is not None else "method.oft_block_size"
            raise SpecError(f"{name} has {sizes[name]} inputs, which this does not divide", field=field)
    train_whole(adapted)
    return adapted


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """The groups of an optimizer over the rotations."""
    return decay_groups(model)
