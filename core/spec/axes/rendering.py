"""How a row becomes text: which chat template, which system prompt, what a control token in a row's text is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from core.spec.axes.pairs import Pairs
from core.spec.base import SpecModel, short_form

Family = Literal[
    "chatml",
    "command-r",
    "deepseek",
    "gemma",
    "gemma3",
    "granite",
    "llama2",
    "llama3",
    "llama3.1",
    "mistral",
    "phi3",
    "phi4",
    "qwen2.5",
    "qwen3",
    "smollm2",
    "zephyr",
]
"""Template families that eft has a training template of its own for (core/train/render/families.py)."""

Prose = Annotated[str, StringConstraints(min_length=1, max_length=100_000)]
Argument = bool | int | float | Annotated[str, StringConstraints(max_length=10_000)] | None
ArgumentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]


class AnyTemplate(SpecModel):
    """Common fields of all templates; not an arm."""

    type: str
    system_prompt: Prose | None = None
    """First message of every chat without a system message."""
    special_tokens: Literal["inert", "real"] | None = None
    """Meaning of a control token spelled in a row's text (`<|im_end|>` in a user's message). `inert`: ordinary text.
    `real`: the token. Default: `inert` if a template writes the control tokens (chats and instructions), `real` in
    plain strings (`prompt`/`completion`, `text`)."""
    pairs: Pairs = "auto"
    """How the two strings of a `prompt`/`completion` row become tokens. `chat`: a user message and an assistant's
    answer, through the template. `newline`: plain text with a line break between them, unless the prompt ends in white
    space. `space`: plain text with a space before the completion. `apart`: plain text with nothing between them. These
    tokenise prompt and completion separately, as generation does. `joined`: one string, whose tokens may merge across
    the border. Default: `chat` with a chat template, otherwise `newline` (docs/rendering.md, Pairs)."""
    chat_template_kwargs: dict[ArgumentName, Argument] = Field(default={}, max_length=16)
    """Additional arguments for the template, e.g. `enable_thinking: false`."""


class ModelTemplate(AnyTemplate):
    """The model's own chat template."""

    type: Literal["model"] = "model"


class FamilyTemplate(AnyTemplate):
    """The training template of a family, for a base model without a template, or one whose template rewrites earlier
    turns. The tokenizer must have the family's control tokens. The tuned model includes the template."""

    type: Literal["family"] = "family"
    name: Family
    """Family; docs/rendering.md lists them."""


class GivenTemplate(AnyTemplate):
    """A Jinja template of your own, with transformers' additions. `{% generation %}` marks select what is trained on;
    without them, turns are located automatically. The tuned model includes the template."""

    type: Literal["given"] = "given"
    template: Annotated[str, StringConstraints(min_length=1, max_length=200_000)]
    """Source of the template."""


def _expand(value: str) -> dict[str, Any]:
    return {"type": value} if value in ("model", "given") else {"type": "family", "name": value}


Rendering = Annotated[
    ModelTemplate | FamilyTemplate | GivenTemplate, Field(discriminator="type"), short_form(_expand, "chatml")
]
