"""Where what is trained is kept and updated: beside the model on the device (here), or in host memory
(core/train/memory/offload/optimizer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class Updates(Protocol):
    """What the engine asks of it. `parameters`: what the optimizer steps, float32, by name in the model; their `.grad`
    has the gradients of the window so far once `gather` has returned."""

    parameters: Mapping[str, nn.Parameter]

    def before_pass(self) -> None:
        """The model is about to compute, perhaps by parts of it and not by its own forward."""

    def gather(self) -> None:
        """Every gradient is in `.grad`, and every update is done. Raises what went wrong with either; after an update
        that went wrong, always: the weights are no good then."""

    def skips(self, optimizer: torch.optim.Optimizer, broken: Tensor) -> bool:
        """Whether `update` leaves the weights as they are by itself where `broken`, a scalar on the device, is above
        0."""

    def update(self, optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float | None) -> None:
        """Clip to `max_norm`, given the `norm` of all gradients, step, and drop the gradients. It may go on after it
        has returned: `gather` waits for it, and what the model computes waits for what it needs."""

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients, also those of a backward that was broken off."""

    def written(self) -> None:
        """`parameters` were written to: the model computes with that from now on."""


class OnDevice:
    """The model's own parameters, stepped where they are."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def before_pass(self) -> None:
        pass

    def gather(self) -> None:
        pass

    def skips(self, optimizer: torch.optim.Optimizer, broken: Tensor) -> bool:
        """Torch's fused optimizers can."""
        if not all(group.get("fused") for group in optimizer.param_groups):
            return False
        # What torch's GradScaler tells fused optimizers; their kernels read it on the device.
        optimizer.found_inf = (broken > 0).float()  # type: ignore[attr-defined]
        return True

    def update(self, optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float | None) -> None:
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), max_norm, norm)
        optimizer.step()
        self.drop(optimizer)

    def drop(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def written(self) -> None:
        pass
