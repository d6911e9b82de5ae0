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
    """What all of them share; no arm by itself."""

    type: str
    system_prompt: Prose | None = None
    """First message of every chat that has no system message of its own."""
    special_tokens: Literal["inert", "real"] | None = None
    """What a control token is that a row's text spells out (`<|im_end|>` in a user's message). `inert`: text like any
    other. `real`: the token. Default: `inert` where a template writes the control tokens (chats and instructions),
    `real` in plain strings (`prompt`/`completion`, `text`), where nobody else does."""
    pairs: Pairs = "auto"
    """How the two strings of a `prompt`/`completion` row become tokens. `chat`: a user's message and an assistant's
    answer, through the template. `newline`: plain text with a line break between them, unless the prompt ends in white
    space. `space`: plain text with a space before the completion. `apart`: plain text with nothing between them. These
    tokenise prompt and completion apart, as generation from the prompt does. `joined`: one string, whose tokens may
    merge across the border. Default: `chat` with a chat template, else `newline` (docs/rendering.md, Pairs)."""
    chat_template_kwargs: dict[ArgumentName, Argument] = Field(default={}, max_length=16)
    """Arguments for the template beside messages and tools, e.g. `enable_thinking: false`."""


class ModelTemplate(AnyTemplate):
    """The chat template that comes with the model."""

    type: Literal["model"] = "model"


class FamilyTemplate(AnyTemplate):
    """The training template of a family, for a base model that has none, or one whose own template rewrites earlier
    turns. The tokenizer must have the family's control tokens. The tuned model carries it."""

    type: Literal["family"] = "family"
    name: Family
    """docs/rendering.md has them all."""


class GivenTemplate(AnyTemplate):
    """A Jinja template of your own, with what transformers offers templates. `{% generation %}` marks say what is
    learned; without them the turns are found. The tuned model carries it."""

    type: Literal["given"] = "given"
    template: Annotated[str, StringConstraints(min_length=1, max_length=200_000)]
    """Its source."""


def _expand(value: str) -> dict[str, Any]:
    return {"type": value} if value in ("model", "given") else {"type": "family", "name": value}


Rendering = Annotated[
    ModelTemplate | FamilyTemplate | GivenTemplate, Field(discriminator="type"), short_form(_expand, "chatml")
]
