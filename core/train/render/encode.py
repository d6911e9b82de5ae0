"""Text to tokens, with places in the text found again among the tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import DataError
from core.train.render.controls import Controls
from core.train.render.pieces import Pieces, Split, splits_at

_KEPT = 4096
_SHORT = 200


@dataclass(frozen=True, slots=True)
class Encoded:
    ids: list[int]
    spans: list[tuple[int, int]]
    """[start, end) in tokens, for each span of the text that was asked for."""
    merged: bool
    """A span's first token has something of the text before it, or that text alone gives other tokens."""


@dataclass(frozen=True, slots=True)
class Work:
    """One text to encode, with spans in characters."""

    text: str
    spans: Sequence[tuple[int, int]]
    inside: str | None = None
    """The mark that stands inside spelled control tokens; None when there are none."""
    line: int = 0


class Encoder:
    """One Hugging Face tokenizer, used without adding special tokens: templates write their own.

    A span begins where the tokens differ from those of the text before it, since that is what a model will be given
    when it is asked. Texts are split at control tokens first, and what is between two of them is encoded by itself. So
    only the piece since the last control token is encoded a second time, and short ones (`assistant\\n`) once; and
    where the tokenizer is one that splits like that (`pieces.py`), what chats have in common (a system prompt, tools)
    is encoded once for all of them.
    """

    def __init__(self, tokenizer: Any, controls: Controls) -> None:
        self._tokenizer = tokenizer
        self.controls = controls
        self._backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._renamed: Any = None
        self._kept: dict[str, list[int]] = {}
        known = tokenizer.get_vocab()
        self._pieces = Pieces(self._backend, controls, known) if splits_at(tokenizer, controls) else None
        self.borders = {known[token] for token in controls.tokens if token in known}

    def encode(self, work: Work) -> Encoded:
        return self.encode_many([work])[0]

    def encode_many(self, works: Sequence[Work]) -> list[Encoded]:
        """All at once: the tokenizer has threads of its own for many texts."""
        if self._backend is None:
            return [self._slowly(work) for work in works]
        plain = [work.text for work in works if work.inside is None]
        self._ready(self._backend)
        found = iter(self._pieces.split(plain) if self._pieces is not None else self._whole(plain))
        return [self._apart(work) if work.inside is not None else self._placed(work, next(found)) for work in works]

    def _whole(self, texts: Sequence[str]) -> Iterator[Split]:
        if not texts:
            return
        # Without offsets, which would take a fifth of the time and are needed for few texts.
        for text, encoding in zip(texts, self._backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            ids: list[int] = encoding.ids
            borders = [at for at, token in enumerate(ids) if token in self.borders]
            written = [found.span() for found in self.controls.pattern.finditer(text)]
            yield Split(ids, borders, written)

    def _ready(self, backend: Any) -> None:
        """Whoever used the tokenizer before may have left truncation or padding on."""
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()

    def strings(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """Tokens of plain texts; `special_tokens`: with what the tokenizer puts around every text."""
        if self._backend is None:
            return [list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=special_tokens)["input_ids"]]
        self._ready(self._backend)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=special_tokens)]

    def cut(self, work: Work) -> tuple[list[int], list[int], list[int]]:
        """Tokens before the first span, of it, and behind it, each of the three by itself."""
        text, (start, end), backend = work.text, work.spans[0], self._backend
        if work.inside is not None:
            if backend is None:
                raise self._cannot(work.line)
            backend = self._under_new_names()
            text, (start, end) = self.controls.renamed(text, work.inside, [start, end])
        before, between, behind = (self._ids_of(part, backend) for part in (text[:start], text[start:end], text[end:]))
        return before, between, behind

    def _ids_of(self, text: str, backend: Any) -> list[int]:
        if not text:
            return []
        if backend is None:
            return self._plain(text)
        self._ready(backend)
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    # --- with a `tokenizers` backend ------------------------------------------------------------------

    def _placed(self, work: Work, split: Split) -> Encoded:
        """The n-th control token of the text is the n-th among the tokens: places are found from there."""
        ids, borders, written = split.ids, split.borders, split.written
        if len(borders) != len(written):  # an unknown character, say, has become the control token <unk>
            return self._by_offsets(work, self._backend)
        ends = [end for _, end in written]
        spans, merged = [], False
        for start, end in work.spans:
            first, whole = self._token_at(work.text, ids, start, borders, written, ends)
            behind, ends_whole = self._token_at(work.text, ids, end, borders, written, ends)
            if not ends_whole:  # what follows changes the last tokens: only their places tell which are the span's
                return self._by_offsets(work, self._backend)
            merged |= not whole
            spans.append((first, max(first, behind)))
        return Encoded(ids, spans, merged)

    def _token_at(
        self,
        text: str,
        ids: list[int],
        place: int,
        borders: list[int],
        written: list[tuple[int, int]],
        ends: list[int],
    ) -> tuple[int, bool]:
        """The first token that is not one of the text before `place`, and whether all of those are there."""
        if place == len(text):
            return len(ids), True
        nearest = bisect_right(ends, place) - 1
        if nearest >= 0 and ends[nearest] == place:
            return borders[nearest] + 1, True
        begin, border = (written[nearest][0], borders[nearest]) if nearest >= 0 else (0, 0)
        return _agreeing(ids, border, self._ids(text[begin:place], self._backend))

    def _by_offsets(self, work: Work, backend: Any) -> Encoded:
        """As `_placed`, for any text: by where in the text each token is from."""
        encoding = backend.encode(work.text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        spans, merged = [], False
        for start, end in work.spans:
            border = _token_from(encoding, work.text, start, len(ids)) - 1
            while border > 0 and ids[border] not in self.borders:
                border -= 1
            border = max(border, 0)
            begin = encoding.token_to_chars(border)[0] if border else 0
            first, whole = _agreeing(ids, border, self._ids(work.text[begin:start], backend))
            merged |= not whole
            spans.append((first, max(first, _token_from(encoding, work.text, end, len(ids)))))
        return Encoded(ids, spans, merged)

    def _ids(self, text: str, backend: Any) -> list[int]:
        if not text:
            return []
        if backend is not self._backend or len(text) > _SHORT:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
            return ids
        if text not in self._kept:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            self._kept[text] = backend.encode(text, add_special_tokens=False).ids
        return self._kept[text]

    def _apart(self, work: Work) -> Encoded:
        """A text in which control tokens are spelled."""
        assert work.inside is not None
        backend = self._under_new_names()
        places = [place for span in work.spans for place in span]
        text, places = self.controls.renamed(work.text, work.inside, places)
        spans = list(zip(places[::2], places[1::2], strict=True))
        return self._by_offsets(Work(text, spans), backend)

    def _under_new_names(self) -> Any:
        if self._renamed is None:
            self._renamed = self.controls.renamed_tokenizer(self._backend)
            self._ready(self._renamed)
        return self._renamed

    def inert(self, text: str, *, special_tokens: bool, line: int) -> list[int]:
        """Tokens of a text without a single control token of its own; `special_tokens`: with what the tokenizer puts
        around every text."""
        if self._backend is None:
            raise self._cannot(line)
        ids: list[int] = self._under_new_names().encode(text, add_special_tokens=special_tokens).ids
        return ids

    # --- without ---------------------------------------------------------------------------------------

    def _slowly(self, work: Work) -> Encoded:
        if work.inside is not None:
            raise self._cannot(work.line)
        ids = self._plain(work.text)
        spans, merged = [], False
        for start, end in work.spans:
            before, through = self._plain(work.text[:start]), self._plain(work.text[:end])
            first = _common(ids, before)
            merged |= first < len(before)
            spans.append((first, max(first, len(ids) if end == len(work.text) else _common(ids, through))))
        return Encoded(ids, spans, merged)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _cannot(self, line: int) -> DataError:
        return DataError(
            "a text of the row spells a control token, and this model's tokenizer has no fast (tokenizer.json) form "
            "that could keep it apart; take it out of the row",
            field=f"line {line}",
        )


def _agreeing(ids: list[int], at: int, expected: list[int]) -> tuple[int, bool]:
    """How far `ids` are as expected from `at` on, and whether to the end."""
    end = at + len(expected)
    if ids[at:end] == expected:
        return end, True
    same = _common(ids[at:end], expected)
    return at + same, False


def _token_from(encoding: Any, text: str, place: int, count: int) -> int:
    """The first token that has something of the text from `place` on, or `count`."""
    while place < len(text):
        token = encoding.char_to_token(place)
        if token is not None:
            return int(token)
        place += 1
    return count


def _common(left: list[int], right: list[int]) -> int:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same
