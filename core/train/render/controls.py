"""Control tokens: those that a template writes, and never those that a row's own text only spells.

A tokenizer takes every `<|im_end|>` in a text for the token, whoever wrote it. A row is therefore looked through before
it is rendered. Where its text spells a control token, a mark is put inside; the template then writes its own control
tokens beside it, which are the only ones that are whole. For the tokenizer they are put into names that no text can
have, and the mark is taken out: a copy of the tokenizer, which knows the control tokens under those names alone, makes
the very tokens that the original would, with the spelled ones as ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from core.errors import DataError
from core.train.render.jinja.template import MARKS, Marks


class Controls:
    """What counts as a control token of one tokenizer, and the renaming."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if len(token) > 1)
        ordered = sorted(self.tokens, key=lambda token: (-len(token), token))
        marks = "[" + "".join(MARKS) + "]"
        self.pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        """Matches one control token."""
        self._beginnings = "".join(sorted({token[0] for token in ordered}))
        self._marks = re.compile(marks)
        secret = secrets.token_hex(8)
        self._names = {token: f"\U000f0000{secret}{at}\U000f0001" for at, token in enumerate(ordered)}
        """New names, which nobody can write into a row: they are other ones in every process."""

    def suspect(self, texts: Iterable[str]) -> bool:
        """Something in the texts may be taken for a control token, or for one of our marks."""
        for text in texts:
            if not text.isascii() and self._marks.search(text):
                return True
            for beginning in self._beginnings:  # one character is searched for much faster than a pattern
                if beginning in text and self.pattern.search(text):
                    return True
        return False

    def free_marks(self, texts: list[str], line: int) -> Marks:
        """Marks that are in none of the texts."""
        used = set().union(*(set(text) & set(MARKS) for text in texts)) if texts else set()
        free = [mark for mark in MARKS if mark not in used]
        if len(free) < 3:
            raise DataError("the row has too many characters of Unicode's private use area", field=f"line {line}")
        return Marks(*free[:3])

    def broken(self, value: Any, inside: str) -> Any:
        """A copy of a row's text, list or object in which no text spells a control token."""
        match value:
            case str():
                while self.pattern.search(value):
                    value = self.pattern.sub(lambda found: found[0][0] + inside + found[0][1:], value)
                return value
            case list() | tuple():
                return [self.broken(item, inside) for item in value]
            case dict():
                return {self.broken(key, inside): self.broken(item, inside) for key, item in value.items()}
            case _:
                return value

    def renamed(self, text: str, inside: str, places: list[int]) -> tuple[str, list[int]]:
        """The text with its control tokens under their new names and without `inside`, and the same places in it."""
        pieces: list[str] = []
        moved: list[tuple[int, int]] = [(0, 0)]
        at = done = 0
        for found in re.finditer(f"{self.pattern.pattern}|{inside}", text):
            pieces.append(text[done : found.start()])
            pieces.append(self._names.get(found[0], ""))
            at += found.start() - done + len(pieces[-1])
            done = found.end()
            moved.append((done, at))
        pieces.append(text[done:])
        return "".join(pieces), [_moved(place, moved) for place in places]

    def renamed_tokenizer(self, backend: Any) -> Any:
        """The same `tokenizers.Tokenizer`, with the control tokens under their new names."""
        from tokenizers import Tokenizer

        state = json.loads(backend.to_str())
        for added in state["added_tokens"]:
            added["content"] = self._names.get(added["content"], added["content"])
        model = state["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {self._names.get(token, token): number for token, number in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[self._names.get(token, token), score] for token, score in model["vocab"]]
        if model.get("unk_token") in self._names:
            model["unk_token"] = self._names[model["unk_token"]]
        if model.get("merges"):
            model["merges"] = [pair for pair in model["merges"] if not self._makes_control(pair)]
        return Tokenizer.from_str(json.dumps(state))

    def _makes_control(self, pair: Any) -> bool:
        left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
        return left in self._names or right in self._names or left + right in self._names


def _moved(place: int, moved: list[tuple[int, int]]) -> int:
    before, after = next(pair for pair in reversed(moved) if pair[0] <= place)
    return after + place - before


def texts_of(value: Any) -> Iterable[str]:
    """Every text in a row's lists and objects, keys too."""
    match value:
        case str():
            yield value
        case list() | tuple():
            for item in value:
                yield from texts_of(item)
        case dict():
            for key, item in value.items():
                yield from texts_of(key)
                yield from texts_of(item)
