"""What a job says about rendering, as the renderer takes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, assert_never

from core.data.rows import RowFormat
from core.errors import SpecError
from core.spec.axes.rendering import ModelTemplate, Rendering

LossOn = Literal["completions", "last", "turns", "all"]


@dataclass(frozen=True, slots=True)
class RenderOptions:
    loss_on: LossOn = "completions"
    rendering: Rendering = field(default_factory=ModelTemplate)
    row_format: RowFormat | None = None
    """What the rows of the file are; None: chats, or whatever comes."""
    new_tokens: tuple[str, ...] = ()
    """Tokens that the tokenizer is given (`method.new_tokens`)."""


def loss_on_for(chosen: LossOn | None, row_format: RowFormat) -> LossOn:
    """`stage.loss_on` for a file of this format, its default filled in. SpecError where the rows have no such thing."""
    match chosen:
        case None:
            return "all" if row_format == "text" else "completions"
        case "all":
            return "all"
        case "completions" | "last" if row_format == "text":
            raise SpecError("rows of raw text have no completion; set stage.loss_on to `all`", field="stage.loss_on")
        case "turns" if row_format not in ("messages", "sharegpt"):
            raise SpecError(
                f"rows of format {row_format} have no turns with weights to choose from; leave stage.loss_on out",
                field="stage.loss_on",
            )
        case "completions" | "last" | "turns":
            return chosen
        case _ as never:
            assert_never(never)
