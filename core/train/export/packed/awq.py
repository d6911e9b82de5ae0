"""AWQ (Lin et al. 2023, arXiv:2306.00978): linear layers in 4 bits that keep the weights of large inputs best.

The inputs of some layers are divided by factors, one for each channel, and the weights multiplied by them. The products
stay what they were, and the weights of channels with large factors are rounded in finer steps. Whatever makes the
inputs divides them: a norm by its weight, or the linear layer before by its rows. Which module that is, is tried out on
the block itself and not looked up by its name: a fold that changes what the block computes is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from core.train.export.packed.gptq import scales_of
from core.train.export.packed.layout import INT4

POWERS = tuple(step / 10 for step in range(11))
"""Factors that are tried: the size of an input to this power. With 0 nothing is divided."""
SMALLEST = 1e-3
"""Inputs smaller than this share of the largest count as if they were so large."""
UNCHANGED = 1e-4
"""Largest difference of a block's outputs, as a share of their size, that is rounding of float32."""

Form = Literal["weight", "from_one", "rows"]
"""How a module's outputs are divided: by its weight, by a weight that counts from one, or by the rows of a matrix."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Layers that have one input in common, and the module that can divide it."""

    layers: tuple[str, ...]
    source: str
    form: Form


def _weight(module: nn.Module) -> Tensor:
    found: Tensor = module.get_parameter("weight").data
    return found


@torch.no_grad()
def folds_of(block: nn.Module, layers: Collection[str], outputs: Callable[[], Tensor]) -> list[Fold]:
    """The folds of a block. `layers`: names of its quantised layers. `outputs`: what it makes of one row of states."""
    modules = {name: module for name, module in block.named_modules() if name}
    before, groups, makers = _wired(modules, layers, outputs)
    found = []
    for group in groups:
        inputs = _weight(modules[group[0]]).shape[1]
        maker = makers.get(group)
        forms: list[tuple[str, Form]] = (
            [(name, "rows") for name in layers if name not in group and len(_weight(modules[name])) == inputs]
            if maker is None
            else [(maker, "weight"), (maker, "from_one")]
        )
        for source, form in forms:
            fold = Fold(group, source, form)
            if _changes_nothing(fold, modules, before, outputs):
                found.append(fold)
                break
    return found


def _wired(
    modules: Mapping[str, nn.Module], layers: Collection[str], outputs: Callable[[], Tensor]
) -> tuple[Tensor, list[tuple[str, ...]], dict[tuple[str, ...], str]]:
    """The block's outputs, the groups of layers with one input in common, and the norm that makes it, if one does."""
    read: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}

    def note_input(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            read[name] = args[0]

        return note

    def note_output(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
            made[name] = result

        return note

    hooks = [modules[name].register_forward_pre_hook(note_input(name)) for name in layers]
    hooks += [
        module.register_forward_hook(note_output(name))
        for name, module in modules.items()
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 1
    ]
    try:
        before = outputs()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[int, list[str]] = {}
    for name, tensor in read.items():
        groups.setdefault(id(tensor), []).append(name)
    makers = {id(tensor): name for name, tensor in made.items()}
    found = {tuple(names): makers.get(key) for key, names in groups.items()}
    return before, list(found), {names: maker for names, maker in found.items() if maker is not None}


def _changes_nothing(
    fold: Fold, modules: Mapping[str, nn.Module], before: Tensor, outputs: Callable[[], Tensor]
) -> bool:
    """Whether the block computes the same with this fold. The modules are left as they were."""
    touched = [modules[name] for name in (*fold.layers, fold.source)]
    kept = [(parameter, parameter.clone()) for module in touched for parameter in module.parameters()]
    inputs = _weight(modules[fold.layers[0]]).shape[1]
    factors = torch.exp2(torch.arange(inputs, dtype=torch.float32) % 3 - 1)
    try:
        apply_fold(fold, modules, factors, torch.float32)
        after = outputs()
    finally:
        for parameter, values in kept:
            parameter.copy_(values)
    return bool((after - before).abs().max() <= UNCHANGED * before.abs().max())


def apply_fold(
    fold: Fold, modules: Mapping[str, nn.Module], factors: Tensor, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor]]:
    """Divide the input of the fold's layers by about these factors, and multiply their weights. What is stored of the
    source in `dtype` decides the factors to the last bit, so that its rounding is no error of the products. Returns
    these factors, and the parameters of the source that are stored now, by name; rows of a matrix are quantised
    later."""
    source = modules[fold.source]
    stored: dict[str, Tensor] = {}
    weight = _weight(source)
    if fold.form == "rows":
        weight.div_(factors.unsqueeze(1))
    else:
        one = 1.0 if fold.form == "from_one" else 0.0
        divided = ((weight + one) / factors - one).to(dtype).float()
        exact = (weight + one) / (divided + one)
        factors = torch.where(torch.isfinite(exact) & (exact != 0), exact, torch.ones_like(exact))
        weight.copy_(torch.where(factors == exact, divided, weight))
        stored["weight"] = weight.to(dtype)
    if isinstance(bias := getattr(source, "bias", None), Tensor):
        bias.copy_((bias / factors).to(dtype).float())
        stored["bias"] = bias.to(dtype)
    for name in fold.layers:
        _weight(modules[name]).mul_(factors)
    return factors, stored


def factors_for(weights: list[Tensor], products: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The factors [inputs] with which these layers, float32 [outputs, inputs], lose least of their outputs when they
    are rounded. `products`: mean of the products of their inputs, [inputs, inputs]."""
    size = products.diagonal().sqrt()
    size = torch.clamp(size, min=SMALLEST * float(size.max())) if size.max() > 0 else torch.ones_like(size)
    best, least = torch.ones_like(size), torch.inf
    for power in POWERS:
        factors = size**power
        factors = factors / (factors.max() * factors.min()).sqrt()
        lost = 0.0
        for weight in weights:
            q, scales = rounded(weight * factors, products.diagonal() / factors.square(), group, dtype)
            apart = q * scales.repeat_interleave(group, 1) / factors - weight
            lost += float(((apart @ products) * apart).sum())
        if lost < least:
            best, least = factors, lost
    return best


def rounded(weight: Tensor, importance: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The nearest whole numbers [outputs, inputs] and float32 scales [outputs, groups], which `dtype` holds exactly.
    `importance`: mean squares of the inputs, by which the range of each group is chosen."""
    scales = scales_of(weight, importance, group, INT4, dtype)
    return INT4.nearest(weight / scales.repeat_interleave(group, 1)), scales


@torch.no_grad()
def quantise_block(
    block: nn.Module,
    products: Mapping[str, Tensor],
    group: int,
    dtype: torch.dtype,
    outputs: Callable[[], Tensor],
    stored: dict[str, Tensor],
    between: Callable[[], None],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each layer of `products` with its whole numbers and scales. `products`: mean products of the inputs of the
    block's quantised layers, by their names. Other parameters that have changed are put into `stored` by their names.
    The layers' own weights are left multiplied by their factors."""
    modules = dict(block.named_modules())
    mean = dict(products)
    for fold in folds_of(block, list(products), outputs):
        between()
        weights = [_weight(modules[name]) for name in fold.layers]
        factors, changed = apply_fold(fold, modules, factors_for(weights, mean[fold.layers[0]], group, dtype), dtype)
        stored |= {f"{fold.source}.{name}": tensor for name, tensor in changed.items()}
        for name in fold.layers:
            mean[name] = mean[name] / torch.outer(factors, factors)
    for name, product in mean.items():
        between()
        yield (name, *rounded(_weight(modules[name]), product.diagonal(), group, dtype))
