"""Texts encoded piece by piece between control tokens, those that come again once.

A `tokenizers` tokenizer looks for its added tokens first and encodes what is between them piece by piece, so the tokens
of a text are those of its pieces with the control tokens between them. That holds where control tokens take nothing of
the text around them, nothing is done to the whole text before, and no rule asks whether a piece is the first one
(`splits_at`; a property test holds it against the whole text for tokenizers of every family). Then a system prompt that
all rows of a file begin with is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from core.train.render.controls import Controls

KEPT_CHARACTERS = 8_000_000
"""Characters of all pieces that are kept because they came again, at most."""


@dataclass(frozen=True, slots=True)
class Split:
    """A text's tokens."""

    ids: list[int]
    borders: list[int]
    """Where the control tokens are among them."""
    written: list[tuple[int, int]]
    """[start, end) of the control tokens in the text."""


class Pieces:
    """One `tokenizers.Tokenizer`."""

    def __init__(self, backend: Any, controls: Controls, vocabulary: dict[str, int]) -> None:
        self._backend, self._pattern = backend, controls.pattern
        self._numbers = {token: vocabulary[token] for token in controls.tokens}
        self._kept: dict[str, list[int]] = {}
        self._characters = 0
        self._last: dict[str, list[int]] = {}
        """Pieces of the previous call; those that come again are kept."""

    def split(self, texts: Sequence[str]) -> Iterator[Split]:
        """Split each text into its tokens."""
        written = [[found.span() for found in self._pattern.finditer(text)] for text in texts]
        cut = [list(_between(text, spans)) for text, spans in zip(texts, written, strict=True)]
        known = self._encoded(piece for pieces in cut for piece in pieces)
        for text, spans, pieces in zip(texts, written, cut, strict=True):
            ids = list(known[pieces[0]])
            borders = []
            for (start, end), piece in zip(spans, pieces[1:], strict=True):
                borders.append(len(ids))
                ids.append(self._numbers[text[start:end]])
                ids += known[piece]
            yield Split(ids, borders, spans)

    def _encoded(self, pieces: Iterator[str]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"": []}
        new: dict[str, list[int]] = {}
        for piece in pieces:
            if piece in found or piece in new:
                continue
            ids = self._kept.get(piece)
            if ids is None and (ids := self._last.get(piece)) is not None:
                self._keep(piece, ids)
            if ids is None:
                new[piece] = []
            else:
                found[piece] = ids
        encodings = self._backend.encode_batch_fast(list(new), add_special_tokens=False) if new else ()
        for piece, encoding in zip(new, encodings, strict=True):
            new[piece] = encoding.ids
        self._last = new
        return found | new

    def _keep(self, piece: str, ids: list[int]) -> None:
        if self._characters + len(piece) > KEPT_CHARACTERS:
            self._kept.clear()
            self._characters = 0
        self._kept[piece] = ids
        self._characters += len(piece)


def _between(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    done = 0
    for start, end in spans:
        yield text[done:start]
        done = end
    yield text[done:]


def splits_at(tokenizer: Any, controls: Controls) -> bool:
    """Whether this tokenizer encodes what is between control tokens as it would alone."""
    if not tokenizer.is_fast or not controls.tokens:
        return False
    backend = tokenizer.backend_tokenizer
    added = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    if not controls.tokens <= added.keys():
        return False
    for token in (added[content] for content in controls.tokens):
        if token.lstrip or token.rstrip or token.single_word or (token.normalized and backend.normalizer is not None):
            return False
    if getattr(backend.model, "dropout", None):
        return False
    parts = [
        json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part is not None
    ]
    if any(_asks_for_the_first(part) for part in parts):
        return False
    others = [content for content in added if content not in controls.tokens]
    return not any(_meet(other, token) for other in others for token in controls.tokens)


def _asks_for_the_first(part: Any) -> bool:
    """A rule that treats the beginning of the whole text as no other beginning."""
    match part:
        case dict():
            return part.get("prepend_scheme") == "first" or any(map(_asks_for_the_first, part.values()))
        case list():
            return any(map(_asks_for_the_first, part))
        case _:
            return False


def _meet(other: str, token: str) -> bool:
    """There is a text in which an added token and a control token overlap, so that one hides the other."""
    if token in other or other in token:
        return True
    longest = min(len(other), len(token)) - 1
    return any(other.endswith(token[:size]) or token.endswith(other[:size]) for size in range(1, longest + 1))
