"""What all adapters share: the layers that they are put on, and the weights of one that a job continues."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor, nn

from core.errors import SpecError
from core.plan.models.shape import ATTENTION, is_named
from core.plan.models.whole import PACKED, TIED, WHOLE
from core.spec.axes.method import Adapter

NAME = "default"
_MERGE = "leave the fields of `method` out to take that job's, or set `model.adapter: merge`"


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Put the adapter of `folder`, as PEFT has saved it, in the place of the one just made. A new head stays where the
    adapter has none. SpecError where the two have other tensors or shapes."""
    saved = load_file(folder / "adapter_model.safetensors")
    made = adapter_state(model)
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


def saves_ends(model: Any) -> Any:
    """What PEFT takes as `save_embedding_layers`. It would save embedding and head whole where new tokens have made
    them larger, beside the rows of the new tokens."""
    rows = any(getattr(config, "trainable_token_indices", None) for config in model.peft_config.values())
    return False if rows else "auto"


def adapter_state(model: Any) -> dict[str, Tensor]:
    """The tensors of an adapter's files."""
    found: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=saves_ends(model))
    return found


def whole_modules(model: Any, spec: Adapter) -> list[str]:
    """Full names of `method.modules_to_save`. SpecError for a module that does not exist, whose weights are packed, or
    that shares its weights with another."""
    modules = dict(model.named_modules())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    found: list[str] = []
    for asked in spec.modules_to_save:
        here = [name for name in modules if is_named(name, asked)]
        if not here:
            words = f"the model has no module `{asked}`; its modules are {', '.join(sorted(_last_parts(modules)))}"
            raise SpecError(words, field=WHOLE)
        for name in here:
            if isinstance(modules[name], nn.ModuleList | nn.ModuleDict | nn.Sequential):
                raise SpecError(f"{name} is a list of modules; name the modules in it", field=WHOLE)
            if tied and modules[name] in (head, embedding):
                raise SpecError(TIED.format(name), field=WHOLE)
            if any("packed" in inner._buffers for inner in modules[name].modules()):
                raise SpecError(PACKED.format(name), field=WHOLE)
        found += (name for name in here if name not in found)
    return found


def train_whole(model: nn.Module) -> None:
    """Let modules that are trained beside adapters be so in float32; what they answer keeps its dtype."""
    for wrapper in model.modules():
        if not isinstance(wrapper, ModulesToSaveWrapper):
            continue
        trained = wrapper.modules_to_save[NAME]
        dtype = next(trained.parameters()).dtype
        if dtype != torch.float32:
            trained.float()
            trained.register_forward_hook(partial(_as_before, dtype))


def _as_before(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    """Without autocast, a model is computed in float32 throughout, to compare it with what is exported."""
    narrow = isinstance(output, Tensor) and output.is_floating_point() and torch.is_autocast_enabled(output.device.type)
    return output.to(dtype) if narrow else output


def _last_parts(names: Iterable[str]) -> set[str]:
    return {last for name in names if not (last := name.rpartition(".")[2]).isdigit()} - {""}


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
