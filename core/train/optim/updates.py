"""Where what is trained is kept and updated: beside the model on the device (here), or in host memory
(core/train/memory/offload/optimizer.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn


class UpdateStrategy(Protocol):
    """How gradients become new weights, as the engine uses it. `parameters`: the float32 tensors that the optimizer
    steps, by their name in the model; once `synchronize` has returned, their `.grad` has the gradients of the window so
    far."""

    parameters: Mapping[str, nn.Parameter]

    def before_pass(self) -> None:
        """Prepare for a pass of the model, perhaps by parts of it and not by its own forward."""

    def synchronize(self) -> None:
        """Wait until every gradient is in `.grad` and every update is done. Raises what went wrong with either; after a
        failed update always, since the weights are invalid then."""

    def supports_found_inf(self, optimizer: torch.optim.Optimizer, broken: Tensor) -> bool:
        """Whether `update` leaves the weights as they are by itself where `broken`, a scalar on the device, is above
        0."""

    def update(self, optimizer: torch.optim.Optimizer, norm: Tensor, max_norm: float | None) -> None:
        """Clip to `max_norm`, given the `norm` of all gradients, step, and drop the gradients. It may go on after it
        has returned: `synchronize` waits for it, and what the model computes waits for what it needs."""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drop the gradients, also those of a backward that was broken off."""

    def refresh_weights(self) -> None:
        """Let the model compute with `parameters` after they were written to."""


class DeviceUpdates:
    """The model's own parameters, stepped where they are."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def before_pass(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def supports_found_inf(self, optimizer: torch.optim.Optimizer, broken: Tensor) -> bool:
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
        self.zero_grad(optimizer)

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)

    def refresh_weights(self) -> None:
        pass
