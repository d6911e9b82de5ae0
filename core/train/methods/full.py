"""Full fine-tuning: every parameter is trained, or those of some layers."""

from __future__ import annotations

from collections import Counter

from torch import nn

from core.plan.models.freeze import trained_names
from core.plan.models.shape import OF_BLOCK
from core.spec.axes.method import Full
from core.train.optim.groups import ParameterGroup, decay_groups

_ALL = Full()


def adapt_full(model: nn.Module, spec: Full = _ALL, new_head: nn.Module | None = None) -> nn.Module:
    """Give every parameter that is trained a gradient. The weights are expected in float32: in bf16 an update smaller
    than 1/256 of a weight is lost to rounding, so bf16 runs compute under autocast over float32 weights.
    `new_head`: the head of a reward model, which is always trained. SpecError for a part of the model that does not
    exist."""
    model.requires_grad_(True)
    if spec.train is None:
        return model
    list_name, count = _layers(model)
    part, new = spec.train, set[nn.Parameter]()
    if new_head is not None:
        part, new = part.model_copy(update={"head": False}), set(new_head.parameters())
    names = [name for name, parameter in model.named_parameters() if parameter not in new]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    tied = head is None or head.weight is embedding.weight
    chosen = trained_names(part, names, list_name, count, tied=tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen or parameter in new)
    return model


def _layers(model: nn.Module) -> tuple[str, int]:
    """Path and length of the list of layers: of numbered modules, that with most parameters, as core/plan has it."""
    sizes: Counter[str] = Counter()
    numbers: dict[str, set[str]] = {}
    for name, parameter in model.named_parameters():
        if (found := OF_BLOCK.match(name)) is not None:
            sizes[found["list"]] += parameter.numel()
            numbers.setdefault(found["list"], set()).add(found["number"])
    if not sizes:
        return "", 0
    ((name, _),) = sizes.most_common(1)
    return name, len(numbers[name])


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """The groups of an optimizer over the model."""
    return decay_groups(model)
