"""What all adapters share: the layers that they are put on, and the weights of one that a job continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn

from core.errors import SpecError
from core.plan.models.shape import ATTENTION
from core.spec.axes.method import Adapter

_MERGE = "leave the fields of `method` out to take that job's, or set `model.adapter: merge`"


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Put the adapter of `folder`, as PEFT has saved it, in the place of the one just made. A new head stays where the
    adapter has none. SpecError where the two have other tensors or shapes."""
    saved = load_file(folder / "adapter_model.safetensors")
    made: dict[str, Tensor] = get_peft_model_state_dict(model)
    configs: Any = model.peft_config
    heads = {f"base_model.model.{name}." for config in configs.values() for name in config.modules_to_save or ()}
    fresh = [name for name in made if name.startswith(tuple(heads))]
    if not any(name in saved for name in fresh):
        saved |= {name: made[name] for name in fresh}
    if odd := sorted(name for name in saved.keys() | made.keys() if name not in saved or name not in made):
        where = "the adapter to continue lacks" if odd[0] in made else "this job's method has no place for"
        raise SpecError(f"{where} {odd[0]}, and {len(odd) - 1} more tensors differ; {_MERGE}", field="model.adapter")
    for name, tensor in saved.items():
        if tensor.shape != made[name].shape:
            shapes = f"{list(tensor.shape)} in the adapter to continue and {list(made[name].shape)} in this job"
            raise SpecError(f"{name} is {shapes}; {_MERGE}", field="model.adapter")
    set_peft_model_state_dict(model, saved)


def target_modules(model: nn.Module, spec: Adapter) -> str | list[str]:
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
