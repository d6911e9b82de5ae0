"""Plain strings to tokens: a prompt, which may be empty, and what is to be written behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.train.render.encode import Encoder


@dataclass(frozen=True, slots=True)
class Rendered:
    ids: list[int]
    learned: list[bool]
    """True where the token carries loss."""
    cut_prompt: bool = False
    """Tokens merge across the end of a prompt: the completion starts a little earlier than asked."""


@dataclass(frozen=True, slots=True)
class Strings:
    """A prompt and its completion, as plain text."""

    prompt: str
    completion: str
    """With EOS at its end."""
    inert: bool
    """Control tokens that they spell are text."""
    line: int
    apart: bool
    """Each of the two is tokenised by itself."""


class StringEncoder:
    """Tokens of plain strings. Whole strings begin with the tokenizer's own BOS, where it has one."""

    def __init__(self, tokenizer: Any, encoder: Encoder) -> None:
        self._encoder = encoder
        self._bos, self._eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._eos_text = str(tokenizer.eos_token)

    def ended(self, completion: str) -> str:
        """The completion with EOS at its end, once."""
        return completion if completion.endswith(self._eos_text) else completion + self._eos_text

    def prompt(self, text: str, line: int, *, inert: bool) -> list[int]:
        """Tokens of a prompt as the tuned model is given it."""
        (ids,) = self._encode([(text, False)], line, inert)
        return self._open(ids, text)

    def pieces(self, texts: Sequence[str], line: int, *, inert: bool) -> list[list[int]]:
        """Tokens of texts that follow one another, each by itself and without what the tokenizer puts around a text."""
        if inert and self._encoder.controls.suspect(texts):
            return [self._encoder.inert(text, special_tokens=False, line=line) for text in texts]
        return self._encoder.strings(texts, special_tokens=False)

    def render(self, strings: Sequence[Strings]) -> list[Rendered]:
        """The common case in few calls into the tokenizer, which has threads for that."""
        quick = [item for item in strings if not item.inert]
        prompts = self._many([item.prompt for item in quick])
        completions = self._many([item.completion for item in quick if item.apart], special_tokens=False)
        wholes = self._many([item.prompt + item.completion for item in quick if not item.apart])
        found = []
        for item in strings:
            if item.apart:
                before = self.prompt(item.prompt, item.line, inert=True) if item.inert else next(prompts)
                behind = self._answer(item) if item.inert else next(completions)
                found.append(self._pair(self._open(before, item.prompt), behind))
            elif item.inert:
                texts = [(item.prompt, False), (item.prompt + item.completion, True)]
                before, ids = self._encode(texts, item.line, True)
                found.append(self._split(before if item.prompt else [], ids))
            else:
                before, ids = self._once(next(prompts)), self._once(next(wholes))
                found.append(self._split(before if item.prompt else [], ids))
        return found

    def _many(self, texts: Sequence[str], *, special_tokens: bool = True) -> Any:
        return iter(self._encoder.strings(texts, special_tokens=special_tokens) if texts else ())

    def _pair(self, before: list[int], behind: list[int]) -> Rendered:
        return Rendered([*before, *behind], [False] * len(before) + [True] * len(behind))

    def _split(self, before: list[int], ids: list[int]) -> Rendered:
        """Split a pair that was tokenised as one string: what follows the common prefix with the prompt's own tokens is
        learned."""
        start = 0
        while start < min(len(before), len(ids)) and before[start] == ids[start]:
            start += 1
        # A tokenizer that ends every text with EOS does so after the prompt too; that is no merge.
        cut = start < len(before) and before[start:] != [self._eos]
        return Rendered(ids, [False] * start + [True] * (len(ids) - start), cut)

    def _answer(self, item: Strings) -> list[int]:
        """Tokens of a completion in which the EOS at its end is the only control token."""
        body = item.completion[: -len(self._eos_text)]
        if self._encoder.controls.suspect([body]):
            return [*self._encoder.inert(body, special_tokens=False, line=item.line), self._eos]
        return next(self._many([item.completion], special_tokens=False))

    def _encode(self, texts: Sequence[tuple[str, bool]], line: int, inert: bool) -> list[list[int]]:
        """Tokens of texts, each with whether the EOS at its end is one. `inert`: all other control tokens are text."""
        if not inert or not self._encoder.controls.suspect(text for text, _ in texts):
            return [self._once(ids) for ids in self._encoder.strings([text for text, _ in texts])]
        tokens = []
        for text, ended in texts:
            body = text[: -len(self._eos_text)] if ended else text
            ids = self._encoder.inert(body, special_tokens=True, line=line)
            tokens.append(self._once([*ids, self._eos] if ended else ids))
        return tokens

    def _once(self, ids: list[int]) -> list[int]:
        """With the tokenizer's own BOS and EOS at most once, whatever the text itself begins and ends with."""
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            ids = ids[1:]
        return ids[:-1] if ids[-2:] == [self._eos, self._eos] else ids

    def _open(self, ids: list[int], text: str) -> list[int]:
        """A prompt's tokens without an EOS that the tokenizer has put there: the model is to go on."""
        ids = self._once(ids)
        if len(ids) > 1 and ids[-1] == self._eos and not text.endswith(self._eos_text):
            return ids[:-1]
        return ids
