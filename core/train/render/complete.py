"""Whether a rendered chat still says all that its row says. A row that the template leaves something out of is refused.

Two questions, since neither answer alone is enough:

- Of each row: every word of it stands in the text. Templates may strip white space, write JSON, or move a turn.
- Of each shape of row (roles, and which fields they have), once: a word that we add to each field comes out, too. So a
  field is not taken for written because its words happen to stand elsewhere; and a turn of `system` or `tool` does not
  read as a user's.

What need not come out, because it is no text of its own: `weight`; ids of calls, as long as the results come in the
order of the calls; the `name` of a tool turn that is the name of the call it answers. And the reasoning of an answer
that is not learned: templates drop that of earlier turns by design, and nothing is trained on the difference.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

from core.errors import DataError
from core.train.render.families import FAMILIES
from core.train.render.fields import AddedWords, Leaf, added_word, leaves_of, shape_of, usual_shape
from core.train.render.jinja.template import Asked, ChatTemplate, Endless

_KEPT_SHAPES = 4096
_MOST_TRIES = 64
"""Fields that are tried one by one, where a template refused to write all added words at once."""


class Completeness:
    """The check for one template; `fitting`: families that the tokenizer has the control tokens for."""

    def __init__(self, template: ChatTemplate, fitting: Collection[str]) -> None:
        self._template, self._fitting = template, fitting
        self._known: set[Any] = set()
        """Shapes of which everything comes out."""

    def check(self, chat: Asked, text: str, learned: Collection[int], *, prompt: bool = False, shift: int = 0) -> None:
        """Raises DataError when something of the chat is not in `text`. `learned`: the messages that are; `shift`: so
        many messages before the row's own come from the job."""
        if self._is_usual(chat, text, prompt):
            return
        leaves = list(leaves_of(chat, learned))
        place = 0
        for leaf in leaves:
            if leaf.text is None:
                continue
            found = find(leaf, text, place)
            if found is None:
                self._refuse(leaf, chat, shift)
            if leaf.kind == "content":
                place = found
        shape = shape_of(chat, leaves, learned, prompt)
        if shape in self._known:
            return
        lost = self._lost(chat, leaves, learned, prompt) or self._role_lost(chat, text, prompt)
        if lost is not None:
            self._refuse(lost, chat, shift)
        if len(self._known) >= _KEPT_SHAPES:
            self._known.clear()
        self._known.add(shape)

    def _is_usual(self, chat: Asked, text: str, prompt: bool) -> bool:
        """The glance that is enough for most rows: content alone, in the text as it is, of a known shape."""
        if chat.tools or "</think>" in text:
            return False
        place = 0
        for turn in chat.messages:
            words = turn["content"].strip()
            place = text.find(words, place)
            if place < 0 or not words or len(turn) != 2:
                return False
            place += len(words)
        return usual_shape(chat, prompt) in self._known

    @contextmanager
    def way_out(self, chat: Asked) -> Iterator[None]:
        """Around a rendering: where the template itself refuses a chat with tools, say which families take them."""
        try:
            yield
        except Endless:
            raise
        except DataError as error:
            if error.code != DataError.code or not (
                chat.tools or any(turn.get("tool_calls") for turn in chat.messages)
            ):
                raise
            raise DataError(f"{error.message}; {self._take('tools')}", field=error.field) from error

    # --- added words -----------------------------------------------------------------------------------

    def _lost(self, chat: Asked, leaves: Sequence[Leaf], learned: Collection[int], prompt: bool) -> Leaf | None:
        """The first field of which an added word does not come out."""
        text = self._with_words(chat, learned, prompt, None)
        doubtful = [at for at in range(len(leaves)) if text is None or added_word(at) not in text]
        for at in doubtful[:_MOST_TRIES]:
            # A word in one field may change what becomes of another: each is tried alone before it counts as lost.
            alone = self._with_words(chat, learned, prompt, at)
            if alone is not None and added_word(at) not in alone:
                return leaves[at]
        return None

    def _with_words(self, chat: Asked, learned: Collection[int], prompt: bool, only: int | None) -> str | None:
        """The text with a word added to every field, or to one; None where the template refuses that."""
        messages, tools = AddedWords(only).added(chat, learned)
        try:
            return self._template.text(Asked(messages, tools, chat.line, chat.marks), messages, prompt=prompt)
        except Endless:
            raise
        except DataError:
            return None

    def _role_lost(self, chat: Asked, text: str, prompt: bool) -> Leaf | None:
        """The first turn of a role that the template writes as it writes a user's."""
        for role in ("system", "developer", "tool"):
            at = next((at for at, turn in enumerate(chat.messages) if turn["role"] == role), None)
            if at is None or not str(chat.messages[at].get("content") or "").strip():
                continue
            messages = [*chat.messages[:at], {**chat.messages[at], "role": "user"}, *chat.messages[at + 1 :]]
            try:
                same = self._template.text(chat, messages, prompt=prompt) == text
            except Endless:
                raise
            except DataError:
                continue
            if same:
                return Leaf("role", at, "role", role)
        return None

    # --- refusals --------------------------------------------------------------------------------------

    def _refuse(self, leaf: Leaf, chat: Asked, shift: int) -> NoReturn:
        if leaf.message is None:
            where = leaf.path
        elif leaf.message < shift:
            raise DataError(
                f"{self._template.name} does not write the system prompt of the job; put it into the first question of "
                "each row, set data.rendering to a family that has system messages, or give a template",
                field="data.rendering.system_prompt",
                code="not_in_template",
            )
        else:
            where = f"messages[{leaf.message - shift}].{leaf.path}"
        raise DataError(
            f"{self._template.name} {self._words(leaf)}", field=f"line {chat.line}: {where}", code="not_in_template"
        )

    def _words(self, leaf: Leaf) -> str:
        given = "give a template that writes it as data.rendering"
        match leaf.kind:
            case "tools":
                return f"has no place for this part of `tools`, so it would be lost: {self._take('tools')}"
            case "tool call":
                return (
                    "has no place for this part of a tool call, so the model would learn an answer without it: "
                    f"{self._take('tools')}"
                )
            case "reasoning":
                return (
                    "leaves out the reasoning of an answer that is learned, so the model would learn to answer without "
                    "it: make a row of each answer (the chat up to and with it), set `weight` 0 on earlier answers, "
                    f"set stage.loss_on to `last`, or {self._take('reasoning')}"
                )
            case "name":
                return f"has no place for `name`: take it out of the rows, write it into the content, or {given}"
            case "order":
                return (
                    "writes no ids of tool calls, and these results come in another order than their calls: give them "
                    f"in the order of the calls, or {given}"
                )
            case "role":
                return (
                    f"writes a `{leaf.text}` turn as it writes a user's: set data.rendering to a family that has such "
                    f"turns, or {given}"
                )
            case "content":
                return (
                    "leaves out some of this content, so it would be lost: write it into another turn, set "
                    f"data.rendering to a family that takes it, or {given}"
                )

    def _take(self, what: Literal["tools", "reasoning"]) -> str:
        return f"{with_a_place_for(what, self._fitting)}, or take it out of the rows"


def with_a_place_for(what: Literal["tools", "reasoning"], fitting: Collection[str]) -> str:
    """The way out, in words: the families that the tokenizer can take and that have a form for it."""
    names = [
        f"`{name}`"
        for name in fitting
        if (FAMILIES[name].extends_with_tools is not None if what == "tools" else FAMILIES[name].reasoning)
    ]
    given = "give a template that writes it as data.rendering"
    return f"set data.rendering to {' or '.join(names)}, {given}" if names else given


# --- finding it again --------------------------------------------------------------------------------------


def find(leaf: Leaf, text: str, place: int) -> int | None:
    """Where the leaf's words end, looked for from `place` on, then in all of the text; None when they are missing."""
    words = (leaf.text or "").strip()
    for begin in (place, 0) if place else (0,):
        if (at := text.find(words, begin)) >= 0:
            return at + len(words)
    for begin in (place, 0) if place else (0,):
        if (end := _in_order(words, text, begin)) is not None:
            return end
    return None


def _in_order(words: str, text: str, place: int) -> int | None:
    for word in words.split():
        for written in _written(word):
            if (at := text.find(written, place)) >= 0:
                place = at + len(written)
                break
        else:
            return None
    return place


def _written(word: str) -> Iterator[str]:
    """A word as templates may write it: as it is, in JSON, in Python's quotes."""
    yield word
    escaped = json.dumps(word, ensure_ascii=False)[1:-1]
    if escaped != word:
        yield escaped
        yield repr(word)[1:-1]
    if not word.isascii():
        yield json.dumps(word)[1:-1]
