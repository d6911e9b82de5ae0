"""The whole state of an optimizer as tensors and JSON: what it keeps for each parameter, and for each group.

Counters and schedules of some optimizers live in `param_groups`, so groups are kept too, all but their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from core.train.optim.blocks import BlockAdamW

_GROUP = "#"
"""Begins the name of a group's tensor; no parameter's name has it."""


def capture(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by name, and everything else as JSON. TypeError, with its name, for what is neither: it could not be
    restored."""
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            _put(f"{name}:{key}", value, tensors, state)
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append({})
        for key in group.keys() - {"params"}:
            if isinstance(group[key], Tensor):
                tensors[f"{_GROUP}{number}:{key}"] = group[key]
            else:
                _put(key, group[key], tensors, groups[-1])
    return tensors, {"state": state, "groups": groups}


def restore(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
) -> None:
    """Put back what `capture` answered. ValueError when it belongs to another model or optimizer."""
    optimizer.state.clear()
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    for place, value in [*tensors.items(), *numbers.get("state", {}).items()]:
        name, _, key = place.rpartition(":")
        if name.startswith(_GROUP):
            _restore_group(optimizer, int(name.removeprefix(_GROUP)), key, value)
            continue
        if name not in parameters:
            raise ValueError(f"the checkpoint is of another model: it has an optimizer state for {name}")
        parameter = parameters[name]
        # `step` counters live where the optimizer made them: beside the weights if it is fused, else on the CPU.
        if isinstance(value, Tensor) and (value.dim() > 0 or parameter in fused):
            value = value.to(parameter.device)
        optimizer.state[parameter][key] = value
    for number, group in enumerate(numbers.get("groups", ())):  # none in checkpoints of versions before
        for key, value in group.items():
            _restore_group(optimizer, number, key, value)
    if isinstance(optimizer, BlockAdamW):
        optimizer.restored()


def set_learning_rate(group: dict[str, Any], value: float) -> None:
    """Set a group's learning rate; in place where the optimizer holds it as a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def _restore_group(optimizer: torch.optim.Optimizer, number: int, key: str, value: Any) -> None:
    if number >= len(optimizer.param_groups):
        raise ValueError(f"the checkpoint is of another optimizer: it has {number + 1} parameter groups at least")
    group = optimizer.param_groups[number]
    now = group.get(key)
    if isinstance(now, Tensor) and isinstance(value, Tensor):
        now.copy_(value)
    else:
        group[key] = tuple(value) if isinstance(now, tuple) else value


def _put(place: str, value: Any, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    if isinstance(value, Tensor):
        tensors[place] = value
    elif _is_json(value):
        numbers[place] = value
    else:
        raise TypeError(f"the optimizer keeps {place} as {type(value).__name__}, which a checkpoint cannot hold")


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)
