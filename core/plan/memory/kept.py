"""Activations that are kept from the forward to the backward, and the rounded copies of weights beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.plan.activations import Numbers, Pass, kept, selected, worked
from core.plan.constants import INPUTS_IN_FLIGHT
from core.plan.device import Device
from core.plan.logits import chunked
from core.plan.memory.passes import numbers_of
from core.plan.memory.result import Item
from core.plan.models.shape import Shape, Weight
from core.plan.models.weights import WeightBytes
from core.spec.axes.runtime import ActivationsOnHost
from core.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of activations on the device."""

    all: int
    """At the end of the forward."""
    first: int
    """At the peak of the last block's backward."""
    last: int
    """At the peak of the first block's backward."""
    why: str
    host: tuple[Item, ...] = ()
    recomputed: bool = True
    """Whether a block's backward computes its inside once more."""


def kept_of(spec: JobSpec, shape: Shape, held: WeightBytes, device: Device, what: Pass, *, streams: bool) -> Kept:
    one = work = everything = chosen = 0
    cached: dict[tuple[int, frozenset[str]], tuple[int, int, int]] = {}
    for at, (number, names) in enumerate(zip(shape.order, held.adapted, strict=True)):
        if (number, names) not in cached:
            block, numbers = shape.patterns[number], numbers_of(spec, shape, device, names)
            cached[number, names] = (
                kept(shape, block, numbers, what),
                worked(shape, block, numbers, what),
                selected(shape, block, numbers, what),
            )
        whole, beside, some = cached[number, names]
        work = max(work, beside)
        if at < held.first:  # frozen, and nothing below it is trained
            continue
        one = max(one, whole)
        everything, chosen = everything + whole, chosen + some
    how = spec.memory.gradient_checkpointing
    offloads = isinstance(spec.memory.activation_offloading, ActivationsOnHost)
    entry = numbers_of(spec, shape, device, frozenset()).residual * shape.hidden * what.tokens
    if not how and not streams and not offloads:
        why = f"what every block keeps, {what.tokens} tokens"
        return Kept(everything, everything + work, one + work, why, recomputed=False)
    inputs = shape.layers * entry
    if offloads:
        aside = Item("activations", inputs, "the input of every block")
        some = min(INPUTS_IN_FLIGHT + 1, shape.layers) * entry
        return Kept(some, some + one + work, entry + one + work, "inputs of blocks on their way, one inside", (aside,))
    if how == "selective":
        why = f"the large products of every block, one block's inside, {what.tokens} tokens"
        return Kept(chosen, chosen + one + work, one + work, why)
    return Kept(
        inputs,
        inputs + one + work,
        entry + one + work,
        f"every block's input, one block's inside, {what.tokens} tokens",
    )


def casts_of(shape: Shape, held: WeightBytes, numbers: Numbers) -> int:
    """Bytes of the rounded copies of trained matrices that autocast keeps during a forward."""
    if numbers.computed == 4:
        return 0
    if numbers.rotation is not None:  # its powers are counted with what blocks keep
        return 0
    if not numbers.trained:
        return 0 if numbers.fused or numbers.rounded else held.adapter // 2
    head = 0 if chunked(shape, numbers, 0) else shape.vocab * shape.hidden
    if numbers.rounded:
        return 2 * head
    return 2 * (head + sum(_matrices(block) for block in shape.blocks[held.first :]))


def casts_of_block(shape: Shape, held: WeightBytes, numbers: Numbers) -> int:
    """Bytes of the rounded copies that a block makes again where its backward recomputes it: those of the forward went
    with its autocast."""
    if not numbers.trained:
        return casts_of(shape, held, numbers)
    if numbers.rounded:
        return 0
    return 2 * max((_matrices(block) for block in shape.patterns), default=0)


def _matrices(block: Iterable[Weight]) -> int:
    """Numbers of the matrices of a block."""
    return sum(weight.numel for weight in block if len(weight.shape) >= 2)
