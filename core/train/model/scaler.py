"""Loss scaling for fp16 (Micikevicius et al. 2018, arXiv:1710.03740), with the rules of torch.amp.GradScaler.

fp16 has no numbers between 6e-8 and 0: small gradients vanish. So the loss is multiplied before the backward pass and
the gradients are divided by the same factor before they are used. Where one overflowed, the step is skipped and the
factor halved; after `growth_interval` steps in a row without it is doubled. A loss that is no number counts as an
overflow too: fp16 ends at 65,504 in the forward pass as well, and GradScaler, which looks at gradients alone, skips
such a step. But no factor acts on a forward pass: after `PATIENCE` such losses in a row the run has diverged.

The factor is a power of two, so scaling itself rounds nothing, and the state is four numbers: a run that is resumed
goes on to the bit, in mid-window too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INITIAL_SCALE = 1024.0
"""torch begins at 65,536, and a run then begins with some skipped steps; gradients of adapters have room enough."""
LOWEST_SCALE = 2.0**-10
"""Overflow at this factor is no matter of scale any more."""
PATIENCE = 4
"""Steps in a row whose loss was no finite number: the last of them ends the run."""


class LossScaler:
    """The factor on the loss, and how it changes after each step."""

    def __init__(
        self,
        initial: float = INITIAL_SCALE,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = float(initial)
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.steps_since_change = 0
        self.skipped = 0
        """Steps without an update, over the whole run."""
        self.lost = 0
        """Number of the last steps in a row whose loss was no finite number."""

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide in place; an overflow stays what it is."""
        if gradients:
            torch._foreach_mul_(list(gradients), 1.0 / self.scale)

    def helps(self, *, loss_is_finite: bool) -> bool:
        """Whether a step that overflowed may be skipped: a smaller factor, or other rows, may still go well."""
        return not self.exhausted and (loss_is_finite or self.lost + 1 < PATIENCE)

    def update(self, *, overflowed: bool, loss_is_finite: bool = True) -> None:
        """After each step, also one that was skipped."""
        self.lost = 0 if loss_is_finite else self.lost + 1
        if overflowed:
            self.skipped += 1
            self.scale *= self.backoff_factor
            self.steps_since_change = 0
            return
        self.steps_since_change += 1
        if self.steps_since_change >= self.growth_interval:
            self.scale *= self.growth_factor
            self.steps_since_change = 0

    @property
    def exhausted(self) -> bool:
        return self.scale < LOWEST_SCALE

    def about(self) -> dict[str, float]:
        """Entry of the run record."""
        return {
            "initial_scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": float(self.growth_interval),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "steps_since_change": self.steps_since_change,
            "skipped": self.skipped,
            "lost": self.lost,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["scale"])
        self.steps_since_change = int(state["steps_since_change"])
        self.skipped = int(state["skipped"])
        self.lost = int(state.get("lost", 0))  # checkpoints of an earlier version have none
