"""The stage axis: what is learned from a row."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from core.spec.axes.data import RowFormat
from core.spec.base import SpecModel, by_type, short_form


class SFT(SpecModel):
    """Supervised fine-tuning: cross-entropy on the tokens that the model learns to write."""

    rows: ClassVar[tuple[RowFormat, ...]] = ("messages", "sharegpt", "prompt_completion", "instruction", "text")
    """Formats of the rows that the stage learns from."""
    type: Literal["sft"] = "sft"
    loss_on: Literal["completions", "last", "turns", "all"] | None = None
    """Tokens with a loss. `completions`: those of every assistant turn whose `weight` is not 0; prompts have none.
    `last`: those of the last assistant turn. `turns`: those of turns with `weight: 1`. `all`: every token. Default:
    `completions`, or `all` for raw text, which has no prompt."""


Stage = Annotated[SFT, short_form(by_type)]
