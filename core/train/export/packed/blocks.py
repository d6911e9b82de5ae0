"""A model's blocks one after the other over calibration rows: each sees what the blocks before it, quantised already,
make of the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Visit = Callable[[str, nn.Module, dict[str, Tensor], Callable[[], Tensor]], None]
"""(name of the block, the block, mean products of the inputs of its linear layers by their names in it, and what the
block makes of the first row)."""


class _LastBlock(Exception):
    """The last block has been reached; what follows is not needed."""


@torch.no_grad()
def one_after_another(
    model: Any, path: str, rows: Sequence[Tensor], wanted: set[str], visit: Visit, between: Callable[[], None]
) -> None:
    """Visit the blocks of `path` in order; `visit` may change the weights of its block. `wanted`: full names of the
    linear layers whose inputs are looked at. `between` runs before each block and each row, and may raise."""
    blocks = list(model.get_submodule(path))
    states, calls = _begin(model, blocks, rows, between)
    for number, block in enumerate(blocks):
        between()
        name = f"{path}.{number}"
        sums: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for local, module in block.named_modules():
                if f"{name}.{local}" in wanted:
                    stack.callback(module.register_forward_pre_hook(partial(_add, sums, local)).remove)
            _through(block, states, [call[number] for call in calls], between)
        count = sum(len(row) for row in rows)
        here = [call[number] for call in calls]

        def first(block: nn.Module = block, state: Tensor = states[0], call: tuple[Any, Any] = here[0]) -> Tensor:
            return _through(block, [state], [call], between)[0]

        visit(name, block, {local: total / count for local, total in sums.items()}, first)
        states = _through(block, states, here, between)


def _begin(
    model: Any, blocks: Sequence[nn.Module], rows: Sequence[Tensor], between: Callable[[], None]
) -> tuple[list[Tensor], list[list[tuple[Any, Any]]]]:
    """The input of the first block for each row, and what every block is given beside it (masks, positions)."""
    states: list[Tensor] = []
    calls: list[list[tuple[Any, Any]]] = []

    def note(number: int, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        named = dict(named)
        state = args[0] if args else named.pop("hidden_states")
        if number == 0:
            states.append(state)
            calls.append([])
        calls[-1].append((args[1:], named))
        if number == len(blocks) - 1:
            raise _LastBlock

    with ExitStack() as stack:
        for number, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(partial(note, number), with_kwargs=True).remove)
        for row in rows:
            between()
            try:
                model(input_ids=row.long()[None], use_cache=False)
            except _LastBlock:
                continue
    return states, calls


def _through(
    block: nn.Module, states: Sequence[Tensor], calls: Sequence[tuple[Any, Any]], between: Callable[[], None]
) -> list[Tensor]:
    found = []
    for state, (args, named) in zip(states, calls, strict=True):
        between()
        made = block(state, *args, **named)
        found.append(made[0] if isinstance(made, tuple) else made)
    return found


def _add(sums: dict[str, Tensor], name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    rows = args[0].float().flatten(0, -2)
    product = rows.t() @ rows
    sums[name] = sums[name] + product if name in sums else product
