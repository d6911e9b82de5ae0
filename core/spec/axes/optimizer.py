"""The optimizer and schedule axes: how gradients become updates, and the learning rate over time."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from core.spec.axes.optim.optimizers import (
    SGD,
    Adafactor,
    AdaLomo,
    AdamW,
    AdamW4bit,
    AdamW8bit,
    AdEMAMix,
    Apollo,
    ApolloMini,
    BAdam,
    GaLore,
    Lion,
    Muon,
    SophiaG,
)
from core.spec.axes.optim.schedules import Adaptive, Cosine, Linear, Steady
from core.spec.base import by_type, short_form

Optimizer = Annotated[
    AdamW
    | AdamW8bit
    | AdamW4bit
    | AdEMAMix
    | Lion
    | Muon
    | Adafactor
    | AdaLomo
    | GaLore
    | Apollo
    | ApolloMini
    | BAdam
    | SophiaG
    | SGD,
    Field(discriminator="type"),
    short_form(by_type),
]
Schedule = Annotated[Steady | Adaptive, Field(discriminator="type"), short_form(by_type)]

__all__ = ["AdamW", "Cosine", "Linear", "Optimizer", "Schedule"]
