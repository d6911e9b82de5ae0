"""The groups of parameters in which an offloaded optimizer steps: one for each block of the model."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from core.errors import ModelError
from core.train.memory.streaming.blocks import find_blocks, reached_past
from core.train.memory.transfer.transfer import Event

OUTSIDE, HEAD = "outside of the blocks", "output head"


@dataclass(slots=True, eq=False)
class Unit:
    """Parameters that are updated together and waited for together."""

    name: str
    members: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    """Pairs of a parameter of the model and its float32 master on the host."""
    update: Future[None] | None = None
    """Its last update, until it has been waited for."""
    sent: Event = None
    """The device has the weights that its last update gave."""

    @property
    def nbytes(self) -> int:
        """Size of its parameters on the device, bytes."""
        return sum(parameter.nbytes for parameter, _ in self.members)


def block_name(number: int) -> str:
    return f"block {number}"


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks in the order of a forward; none where they cannot be found: then all is updated before the next
    pass."""
    try:
        return [module for _, module in find_blocks(model)]
    except ModelError:
        return []


def units_of(model: nn.Module, blocks: list[nn.Module], masters: Mapping[nn.Parameter, nn.Parameter]) -> list[Unit]:
    """The units in the order in which they are updated. A parameter that several blocks share belongs to the first of
    them; one that can also be reached past the blocks belongs to the unit outside of them."""
    head = output_head(model) if blocks else None
    of_head = set() if head is None else set(head.parameters())
    inside = {p for block in blocks for p in block.parameters()}
    elsewhere = {
        p for module in model.modules() if head is None or module is not head for p in module.parameters(recurse=False)
    }
    apart = of_head - elsewhere - inside
    early = set(reached_past(model, blocks)) - apart
    outside = Unit(OUTSIDE, [(p, m) for p, m in masters.items() if p in early])
    units, taken = [outside], {p for p, _ in outside.members}
    for number, block in enumerate(blocks):
        members = [(p, masters[p]) for p in block.parameters() if p in masters and p not in taken]
        taken |= {p for p, _ in members}
        units.append(Unit(block_name(number), members))
    units.append(Unit(HEAD, [(p, masters[p]) for p in masters if p in apart]))
    return [outside, *(unit for unit in units[1:] if unit.members)]


def output_head(model: Any) -> nn.Module:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found: nn.Module = base.get_output_embeddings()
    return found
