"""Where in the text of a chat the assistant's turns are: what is learned, and after which prompt.

A template with `{% generation %}` marks says it. Any other one is asked by rendering parts of the chat: a turn begins
behind the prompt that the model would be given for it, which must be how the whole chat begins; it ends with the
end-of-turn token behind its last words, or, where a template does not take content as it is, with the chat rendered up
to and with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import DataError
from core.train.render.controls import Controls
from core.train.render.jinja.template import Asked, ChatTemplate


@dataclass(frozen=True, slots=True)
class Turn:
    """[start, end) in characters. `message`: its place in the chat; None where the template's marks do not tell it."""

    start: int
    end: int
    message: int | None


@dataclass(frozen=True, slots=True)
class Turned:
    text: str
    turns: list[Turn]


class TurnFinder:
    """Finds the turns that one template writes. `twin`: a family's template with generation marks, which is used for
    the chats that it writes as the same text."""

    def __init__(self, template: ChatTemplate, twin: ChatTemplate | None, controls: Controls) -> None:
        self._template, self._twin, self._controls = template, twin, controls

    def find(self, chat: Asked) -> Turned:
        """DataError when the template refuses the chat, or when its turns cannot be told from its prompts."""
        if self._template.marked:
            text, spans = self._template.marked_text(chat)
            return self._by_marks(chat, text, spans)
        text = self._template.text(chat, chat.messages)
        if self._twin is not None:
            try:
                theirs, spans = self._twin.marked_text(chat)
            except DataError:
                theirs = None  # a chat that the family's template knows nothing of, and the model's own does
            if theirs == text and len(spans) == len(assistants(chat.messages)):
                return self._by_marks(chat, text, spans)
        return Turned(text, self._by_parts(chat, text))

    def _by_marks(self, chat: Asked, text: str, spans: list[tuple[int, int]]) -> Turned:
        spans = [(start, end) for start, end in spans if start < end]
        if not spans:
            raise DataError(
                f"{self._template.name} marks nothing of this chat as the assistant's", field=f"line {chat.line}"
            )
        places = assistants(chat.messages)
        known = len(places) == len(spans)
        return Turned(
            text,
            [
                Turn(start, self._ended(text, start, end), places[at] if known else None)
                for at, (start, end) in enumerate(spans)
            ],
        )

    # --- a template without marks ----------------------------------------------------------------------

    def _by_parts(self, chat: Asked, text: str) -> list[Turn]:
        ends = self._ends(chat, text)
        turns: list[Turn] = []
        for at in assistants(chat.messages):
            before = self._template.text(chat, chat.messages[:at], prompt=True) if at else ""
            if not text.startswith(before):
                raise self._rewritten(chat, at)
            end = ends.get(at) or self._through(chat, text, at, len(before))
            if end <= len(before):
                raise self._rewritten(chat, at)
            turns.append(Turn(len(before), end, at))
        if not turns:
            raise DataError("the chat has no assistant turn, so there is nothing to learn", field=f"line {chat.line}")
        return turns

    def _ends(self, chat: Asked, text: str) -> dict[int, int]:
        """Ends of the turns whose content the template writes as it is, by a mark behind their last words."""
        mark, messages, marked = chat.marks.closing, list(chat.messages), []
        for at in assistants(messages):
            content = messages[at].get("content")
            if isinstance(content, str) and content.strip() and not messages[at].get("tool_calls"):
                words = content.rstrip()
                messages[at] = {**messages[at], "content": words + mark + content[len(words) :]}
                marked.append(at)
        if not marked:
            return {}
        pieces = self._template.text(chat, messages).split(mark)
        if len(pieces) != len(marked) + 1 or "".join(pieces) != text:
            return {}
        ends: dict[int, int] = {}
        place = 0
        for at, piece in zip(marked, pieces[:-1], strict=True):
            place += len(piece)
            end = self._next_control(text, place)
            if end is not None:
                ends[at] = end
        return ends

    def _through(self, chat: Asked, text: str, at: int, start: int) -> int:
        """End of a turn by rendering the chat up to and with it."""
        through = text if at + 1 == len(chat.messages) else self._template.text(chat, chat.messages[: at + 1])
        if not text.startswith(through):
            raise self._rewritten(chat, at)
        return self._ended(text, start, len(through))

    def _next_control(self, text: str, place: int) -> int | None:
        """End of the control token behind `place`, if nothing but white space is between them."""
        while place < len(text) and text[place].isspace():
            place += 1
        found = self._controls.pattern.match(text, place)
        return found.end() if found else None

    def _ended(self, text: str, start: int, end: int) -> int:
        """White space that a template writes after the end-of-turn token is never generated, since generation has
        stopped there."""
        words = start + len(text[start:end].rstrip())
        ending = [found.end() for found in self._controls.pattern.finditer(text, max(start, words - 256), end)]
        return words if ending and ending[-1] == words else end

    def _rewritten(self, chat: Asked, at: int) -> DataError:
        return DataError(
            f"{self._template.name} writes the turns before messages[{at}] differently once there is an answer, so "
            "what is to be learned cannot be told from the prompt; set data.rendering to a family, give a template "
            "with {% generation %} marks, or take rows of format prompt_completion with data.rendering.pairs `newline`",
            field=f"line {chat.line}: messages[{at}]",
        )


def assistants(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [at for at, message in enumerate(messages) if message["role"] == "assistant"]
