"""Bodies of `/v1/chat/completions` and `/v1/completions`, in OpenAI's words, as requests to a served model."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from api.http.body import Body
from core.errors import Fault, SpecError, plainly
from core.spec.load import load_json, storable
from core.spec.serving.request import (
    LONGEST_STOP,
    MOST_CHOICES,
    MOST_STOPS,
    MOST_TOP_LOGPROBS,
    CompletionRequest,
    ServedAdapter,
)

StopText = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_STOP)]
Zero = Annotated[float, Field(ge=0, le=0)]
"""A number that nothing here can be told but 0."""
DEFAULT_TOKENS = 16
"""Tokens of a completion that names no number, as OpenAI's."""
_EXAMPLE_MODEL = "voice-intents"


class StreamOptions(Body):
    include_usage: bool = False
    """Send the numbers of tokens at the end of the stream."""
    include_obfuscation: bool = False
    """Accepted, without effect."""


class AskingBody(Body):
    """Fields of both."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=400)]
    """A model, a job, JOB@CHECKPOINT, JOB@base, or a base model (`GET /v1/models`)."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Number of answers. Default: 1."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0: the most likely token each time. Default: 1."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the probability from which tokens are drawn. Default: 1."""
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    """Texts that end an answer, which does not have them."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Seed of the draws. Default: another one each time."""
    stream: bool | None = None
    """Send the answer as server-sent events, as it is made."""
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Accepted, without effect."""
    presence_penalty: Zero | None = None
    """0 alone."""
    frequency_penalty: Zero | None = None
    """0 alone."""
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    """Empty alone."""

    @property
    def streamed(self) -> bool:
        return bool(self.stream)

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _common(self, adapter: ServedAdapter | None, most_tokens: int) -> dict[str, Any]:
        seed = secrets.randbits(62) if self.seed is None else self.seed % 2**63
        return {
            "adapter": adapter,
            "most_tokens": most_tokens,
            "n": self.n or 1,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop or [],
            "seed": seed,
        }


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatTurn(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: str | None = None
    """Accepted, without effect."""

    def told(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(AskingBody):
    """What `/v1/chat/completions` takes."""

    messages: Annotated[list[ChatTurn], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of an answer, at most. Default: as many as fit."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The same, by its newer name."""
    logprobs: bool | None = None
    """Tell the log-probability of each token."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Number of the most likely tokens that are told beside it."""
    store: bool | None = None
    """Accepted, without effect: nothing is stored."""
    metadata: dict[str, str] | None = None
    """Accepted, without effect."""

    def request(self, adapter: ServedAdapter | None, most_tokens: int) -> CompletionRequest:
        """The request; `most_tokens`: of prompt and answer together."""
        return CompletionRequest(
            **self._common(adapter, most_tokens),
            messages=[turn.told() for turn in self.messages],
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionBody(AskingBody):
    """What `/v1/completions` takes."""

    prompt: str | list[int] | Annotated[list[str] | list[list[int]], Field(min_length=1, max_length=1)]
    """Text or tokens to continue: one prompt a request."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of an answer, at most. Default: 16."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Tell the log-probability of each token, and so many of the most likely ones beside it."""
    echo: bool | None = None
    """Put the prompt in front of the answer."""
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    """1 alone."""

    def request(self, adapter: ServedAdapter | None, most_tokens: int) -> CompletionRequest:
        """As `ChatBody.request`."""
        prompt: str | list[int]
        match self.prompt:
            case (str() as text) | [str() as text]:
                prompt = text
            case [[*tokens]] | [*tokens]:
                prompt = [token for token in tokens if isinstance(token, int)]  # all are: the field's type says so
        return CompletionRequest(
            **self._common(adapter, most_tokens),
            prompt=prompt,
            max_tokens=self.max_tokens or DEFAULT_TOKENS,
            logprobs=self.logprobs,
            echo=bool(self.echo),
        )


CHAT_EXAMPLE: dict[str, Any] = {
    "model": _EXAMPLE_MODEL,
    "messages": [{"role": "user", "content": "Switch on the light in the kitchen"}],
    "temperature": 0,
    "max_tokens": 64,
}
COMPLETION_EXAMPLE: dict[str, Any] = {"model": _EXAMPLE_MODEL, "prompt": "The kitchen light is", "max_tokens": 8}

AnyBody = TypeVar("AnyBody", bound=AskingBody)


def parsed(kind: type[AnyBody], body: bytes) -> AnyBody:
    """A body. Raises SpecError with a fault for each wrong field."""
    try:
        return kind.model_validate(storable(load_json(body)))
    except ValidationError as error:
        faults = []
        for item in error.errors(include_url=False, include_input=False)[:20]:
            place = ".".join(str(part) for part in item["loc"] if not _names_arm(part)) or None
            unknown = item["type"] == "extra_forbidden"
            words = f"there is no `{place}` here; remove it" if unknown else plainly(item["msg"])
            faults.append(Fault("unknown_field" if unknown else "invalid_value", words, place))
        first = faults[0]
        where = f"{first.field}: " if first.field else ""
        raise SpecError(f"{where}{first.message}", field=first.field, faults=tuple(faults), code=first.code) from error


def _names_arm(part: Any) -> bool:
    """Whether a part of a place names an arm of a union, not a field."""
    return isinstance(part, str) and (part.startswith(("list[", "constrained-")) or part in ("str", "int", "TextPart"))
