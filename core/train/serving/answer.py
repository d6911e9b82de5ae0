"""One answer in the making: its tokens, its text as it grows, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from core.spec.serving.request import FinishReason
from core.train.generation.sampling import Key, SamplingParams

UNFINISHED = "\ufffd"
"""What a tokenizer makes of bytes that are not yet a whole character."""


class TextStream:
    """Text of tokens as they come. Text that may still become a stop text, or part of a character, is held back."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        self._prefix = self._read = 0
        """Tokens from which text is decoded, and those whose text was already given."""
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take a token; the text that is certain now."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        now = self._decode(self._tokens[self._prefix :])
        if len(now) <= len(before) or now.endswith(UNFINISHED):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return self._certain(now[len(before) :])

    def end(self) -> str:
        """The text that was held back, once no more comes."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._prefix : self._read])
        left = self._certain(self._decode(self._tokens[self._prefix :])[len(before) :])
        if not self.stopped:
            left, self._held = left + self._held, ""
        return left

    def _certain(self, more: str) -> str:
        text = self._held + more
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max(
            (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


@dataclass
class LiveAnswer:
    """One choice of one request."""

    request: str
    """Id of the request."""
    index: int
    """Number of the choice."""
    adapter: str | None
    """Name of the adapter; None: the base alone."""
    prompt: Sequence[int]
    params: SamplingParams
    key: Key
    text: TextStream
    top_logprobs: int | None = None
    """As `CompletionRequest.logprobs`."""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def room(self) -> int:
        """Tokens that prompt and answer may have."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def cached(self) -> int:
        """Tokens whose keys and values have been computed: all but the newest."""
        return len(self.prompt) + len(self.tokens) - 1

    def add(self, token: int) -> str:
        """Take the next token; the text that is certain now, all of it once the answer has ended."""
        self.tokens.append(token)
        if token in self.params.stop_token_ids:
            self.finish_reason = "stop"
            return self.text.end()
        text = self.text.add(token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.params.max_new_tokens:
            text += self.text.end()
            self.finish_reason = "stop" if self.text.stopped else "length"
        return text
