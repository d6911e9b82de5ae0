"""One request to a served model. The API writes it, the worker passes it on, and core/train/serving answers it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from core.spec.axes.method import LoRA
from core.spec.base import SpecModel

MOST_CHOICES = 8
"""Answers to one prompt, at most."""
MOST_TOP_LOGPROBS = 20
MOST_STOPS = 4
LONGEST_STOP = 200
"""Characters of a stop text."""


class ServedAdapter(SpecModel):
    """An adapter over the base that is served."""

    folder: str
    """Folder of an adapter in PEFT's form, or of a checkpoint. The API gives it relative to the data root."""
    checkpoint: bool = False
    """Whether the folder is a checkpoint, whose weights have no configuration beside them."""
    method: LoRA | None = Field(default=None)
    """The adapter of a checkpoint."""


class CompletionRequest(SpecModel):
    """What to generate, and how."""

    adapter: ServedAdapter | None = Field(default=None)
    """Null: the base alone."""
    messages: list[dict[str, Any]] | None = Field(default=None)
    """A conversation, for the chat template; null: `prompt`."""
    prompt: str | list[int] | None = Field(default=None)
    """Text or tokens to continue."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of an answer, at most; null: as many as `most_tokens` and the model's positions leave."""
    most_tokens: Annotated[int, Field(ge=1)]
    """Tokens of prompt and answer together, at most."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """0: the most likely token each time."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: Annotated[list[str], Field(max_length=MOST_STOPS)] = Field(default=[])
    """Texts that end an answer, which does not have them."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Number of the most likely tokens that are told for each token; null: no log-probabilities."""
    echo: bool = False
    """Put the prompt in front of the answer's text."""


FinishReason = Literal["stop", "length"]
