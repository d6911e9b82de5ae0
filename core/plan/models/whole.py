"""Modules that are trained whole beside adapters (`method.modules_to_save`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from core.errors import SpecError
from core.plan.models.shape import Selected, Shape, Weight, is_named

WHOLE = "method.modules_to_save"
TIED = (
    "{} shares its weights with the model's output head or its embedding, and training one of them alone would part "
    "them; use `method: full` with `train: {{layers: none, embeddings: true}}`, or leave it out"
)
PACKED = (
    "the weights of {} are packed, and the steps of packed weights are larger than any update; leave it out, or name "
    "it in `quantization.skip_modules`"
)


def without(targets: Selected, whole: Collection[str], shape: Shape) -> Selected:
    """The layers that get an adapter without those in modules that are trained whole, which PEFT leaves out. SpecError
    where none is left."""
    if not whole:
        return targets
    blocks = tuple(
        frozenset(name for name in names if _module_of(f"{shape.list_name}.{number}.{name}.weight", whole) is None)
        for number, names in enumerate(targets[1])
    )
    outside = frozenset(name for name in targets[0] if _module_of(f"{name}.weight", whole) is None)
    if not any((outside, *blocks)):
        raise SpecError("every layer that would get an adapter is trained whole; use `method: full`", field=WHOLE)
    return outside, blocks


def whole_weights(shape: Shape, asked: Collection[str], packed: Selected) -> Iterator[tuple[str, Weight]]:
    """(full name, weight) of all that is trained whole. SpecError as the trainer raises it."""
    for prefix, part, unfit in (
        ("", shape.outside, packed[0]),
        *((f"{shape.list_name}.{n}.", block, packed[1][n]) for n, block in enumerate(shape.blocks)),
    ):
        for weight in part:
            module = _module_of(f"{prefix}{weight.name}", asked)
            if module is None:
                continue
            if shape.tied and weight.kind in ("embedding", "head"):
                raise SpecError(TIED.format(module), field=WHOLE)
            if weight.module in unfit:
                raise SpecError(PACKED.format(module), field=WHOLE)
            yield f"{prefix}{weight.name}", weight
    for one in asked:
        if not any(_module_of(f"{name}.weight", [one]) for name in _names(shape)):
            if shape.tied and one.endswith("head"):
                raise SpecError(TIED.format(one), field=WHOLE)
            known = sorted({name.rpartition(".")[2] for name in _names(shape)})
            raise SpecError(f"the model has no module `{one}`; those with weights are {', '.join(known)}", field=WHOLE)


def _names(shape: Shape) -> Iterator[str]:
    yield from (weight.module for weight in shape.outside)
    for number, block in enumerate(shape.blocks):
        yield from (f"{shape.list_name}.{number}.{weight.module}" for weight in block)


def _module_of(parameter: str, asked: Collection[str]) -> str | None:
    """The module among those asked for that the parameter is in."""
    parts = parameter.split(".")
    paths = (".".join(parts[:end]) for end in range(1, len(parts)))
    return next((path for path in paths if any(is_named(path, one) for one in asked)), None)
