"""The optimizer and schedule axes: how gradients become updates, and the learning rate over time."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from core.spec.axes.optim.schedules import Adaptive, Cosine, Linear, Steady
from core.spec.base import SpecModel, by_type, short_form

Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(SpecModel):
    """AdamW (Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    type: Literal["adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = None
    """Peak learning rate. Default: 2e-4 with adapters, 2e-5 for full fine-tuning (with `method: auto`, that of the
    chosen method)."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Decoupled decay; biases and norms are exempt."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)  # a list, as JSON has no tuples
    """Decay of the running means of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""


Optimizer = Annotated[AdamW, short_form(by_type)]


Schedule = Annotated[Steady | Adaptive, Field(discriminator="type"), short_form(by_type)]

__all__ = ["AdamW", "Cosine", "Linear", "Optimizer", "Schedule"]
