"""A compiled chat template: chats in, text out, with the places of what the model is to write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from jinja2 import TemplateError

from core.errors import DataError, EftError
from core.train.render.jinja.bounds import TooMuch
from core.train.render.jinja.sandbox import Plain, Sandbox

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_GENERATION_BLOCK = re.compile(r"(\{%-?)\s*(?:end)?generation\s*(-?%\})")

MARKS = tuple(map(chr, range(0xF8F0, 0xF8F8)))
"""Characters of the private use area that stand in a rendered text for a moment. A row that has one of them is seen
(`controls.py`), and another one is taken."""
_ESCAPED = {mark: (json.dumps(mark)[1:-1], quote(mark)) for mark in MARKS}
"""As `tojson` of old and `urlencode` write them."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks in use for one row: none of them is in it."""

    opening: str = MARKS[0]
    closing: str = MARKS[1]
    inside: str = MARKS[2]
    """Stands inside what looks like a control token in the row's own text."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A chat as templates take it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    line: int
    marks: Marks = Marks()


class Endless(DataError):
    """A template went beyond the sandbox's bounds: no other chat is worth trying."""


class ChatTemplate:
    """One template with its constants. `name` is what its errors call it."""

    def __init__(self, source: str, constants: Mapping[str, Any], *, name: str, ours: bool = False) -> None:
        """`constants`: the tokenizer's special tokens and the user's own arguments. `ours`: the source is eft's own and
        runs without a guard. TemplateError says what is wrong with the source."""
        self.source, self.name = source, name
        self.marked = bool(_GENERATION_TAG.search(source))
        """It says itself, with `{% generation %}`, what the model is to write."""
        self._sandbox: Sandbox | Plain = Plain() if ours else Sandbox()
        self._constants = dict(constants)
        try:
            with self._sandbox.bounded():
                self._compiled = self._sandbox.from_string(source)
        except (RecursionError, MemoryError) as error:
            raise TemplateError("its parts are nested too deeply") from error
        except TemplateError:
            raise
        except Exception as error:  # Jinja makes Python of it, and Python has limits that are not Jinja's
            raise TemplateError(str(error) or type(error).__name__) from error

    def text(self, chat: Asked, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        """`messages` with the chat's tools as one text; `prompt`: up to where the model begins to write."""
        return self._render(chat, messages, prompt)

    def marked_text(self, chat: Asked) -> tuple[str, list[tuple[int, int]]]:
        """The whole chat and the spans (in characters) of its generation blocks, neighbours joined."""
        self._sandbox.opening, self._sandbox.closing = chat.marks.opening, chat.marks.closing
        try:
            text, spans = unmark(self._render(chat, chat.messages, False), chat.marks)
            if chat.marks.opening in text or chat.marks.closing in text:
                raise DataError(f"{self.name} has a generation block inside another", field=f"line {chat.line}")
            return text, spans
        finally:
            self._sandbox.opening = self._sandbox.closing = ""

    def _render(self, chat: Asked, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        if any("reasoning_content" in message for message in messages):
            # Templates have two names for thoughts; transformers hands them over under both.
            messages = [
                {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message
                for message in messages
            ]
        self._sandbox.begin(messages, *messages)
        try:
            with self._sandbox.bounded():
                text = self._compiled.render(
                    **self._constants,
                    messages=messages,
                    tools=list(chat.tools) or None,
                    documents=None,
                    add_generation_prompt=prompt,
                )
        except EftError:
            raise
        except RecursionError as error:
            raise Endless(f"{self.name} never ends on this chat", field=f"line {chat.line}") from error
        except TooMuch as error:
            raise Endless(f"{self.name} refuses this chat: {error}", field=f"line {chat.line}") from error
        except Exception as error:  # a template is a program of somebody else's: whatever it raises is its refusal
            detail = str(error) or type(error).__name__
            raise DataError(f"{self.name} refuses this chat: {detail}", field=f"line {chat.line}") from error
        # The closing mark alone only looks for the ends of turns (turns.py), which are then found in another way.
        for mark in (chat.marks.opening, chat.marks.inside):
            if any(escaped in text for escaped in _ESCAPED[mark]):
                raise DataError(
                    f"{self.name} writes characters as escapes, so control tokens in this row's text cannot be kept "
                    "apart; take them out of the row",
                    field=f"line {chat.line}",
                )
        return text


def unmark(text: str, marks: Marks) -> tuple[str, list[tuple[int, int]]]:
    """The text without opening and closing marks, and the spans that they enclosed."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    done = at = 0
    while (opened := text.find(marks.opening, done)) >= 0:
        closed = text.find(marks.closing, opened)
        if closed < 0:
            break
        begin = at + opened - done
        at = begin + closed - opened - 1
        pieces += (text[done:opened], text[opened + 1 : closed])
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], at)
        else:
            spans.append((begin, at))
        done = closed + 1
    pieces.append(text[done:])
    return "".join(pieces), spans


def without_marks(source: str) -> str:
    """The template less its generation tags, for engines that do not know them. What the tags did to the white space
    around them stays."""
    return _GENERATION_BLOCK.sub(r"\1 if true \2\1 endif \2", source)
