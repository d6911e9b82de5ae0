"""What a chat says, field by field: the values that must come out of its rendering, and words added to them to see it.

`leaves_of` and `AddedWords` go through a chat in the same order: the n-th added word stands in the n-th leaf.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from core.train.render.jinja.template import Asked

Kind = Literal["content", "reasoning", "name", "tool call", "tools", "order", "role"]

_TAGS = re.compile(r"</?think>")
_REWRITTEN = ("type", "required")
"""Keywords of JSON schema that templates write in other words."""
_NAMING = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose objects have names for keys."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of a row that must come out."""

    kind: Kind
    message: int | None
    """Its place in the chat; None for tools."""
    path: str
    """Inside the message, or the row."""
    text: str | None
    """None for numbers, booleans and nulls, which are written in many ways: an added word speaks for them."""


# --- what a row says ---------------------------------------------------------------------------------------


def leaves_of(chat: Asked, learned: Collection[int]) -> Iterator[Leaf]:
    """In the order in which `AddedWords` comes to them."""
    for at, turn in enumerate(chat.messages):
        content = turn.get("content")
        if isinstance(content, str) and content.strip():
            thoughts, content = _thoughts(turn)
            if thoughts and at in learned:
                yield Leaf("reasoning", at, "content", _TAGS.sub(" ", thoughts))
            if content.strip():
                yield Leaf("content", at, "content", content)
        if len(turn) == 2:  # role and content
            continue
        if at in learned and (turn.get("reasoning_content") or "").strip():
            yield Leaf("reasoning", at, "reasoning_content", turn["reasoning_content"])
        if turn.get("name") and not _is_called(chat.messages, at):
            yield Leaf("name", at, "name", turn["name"])
        for number, call in enumerate(turn.get("tool_calls") or ()):
            path = f"tool_calls[{number}].function"
            yield Leaf("tool call", at, f"{path}.name", call["function"]["name"])
            for inner, value in _parts(call["function"]["arguments"], f"{path}.arguments"):
                yield Leaf("tool call", at, inner, value)
        if turn["role"] == "tool" and _out_of_order(chat.messages, at):
            yield Leaf("order", at, "tool_call_id", turn["tool_call_id"])
    for number, tool in enumerate(chat.tools):
        for inner, value in _parts(tool["function"], f"tools[{number}].function", schema=True):
            yield Leaf("tools", None, inner, value)


def _parts(value: Any, path: str, *, schema: bool = False, names: bool = False) -> Iterator[tuple[str, str | None]]:
    """(path, text) of keys and values; None for what is no text. Empty texts have nothing to show.

    `schema`: the definition of a tool. Its keywords are JSON schema's, not the row's, and templates write types, what
    is required, and flags in words of their own. `names`: the keys of this object are the row's own all the same."""
    match value:
        case dict():
            for key, item in value.items():
                if schema and not names and key in _REWRITTEN:
                    continue
                inner = f"{path}.{key[:40]}"
                if key and (names or not schema):
                    yield inner, key
                yield from _parts(item, inner, schema=schema, names=schema and not names and key in _NAMING)
        case list() | tuple():
            for at, item in enumerate(value):
                yield from _parts(item, f"{path}[{at}]", schema=schema)
        case str():
            if value.strip():
                yield path, value
        case bool() | None if schema:
            pass
        case _:
            yield path, None


def _thoughts(turn: Mapping[str, Any]) -> tuple[str, str]:
    """What an answer's content has up to the end of its thoughts, and what follows."""
    content = turn["content"]
    if turn["role"] != "assistant" or "</think>" not in content:
        return "", content
    before, end, behind = content.rpartition("</think>")
    return before + end, behind


def _calls_before(messages: Sequence[Mapping[str, Any]], at: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
    """The place of the assistant's turn that a tool turn answers, and its calls."""
    while at and messages[at]["role"] == "tool":
        at -= 1
    return at, messages[at].get("tool_calls") or ()


def _is_called(messages: Sequence[Mapping[str, Any]], at: int) -> bool:
    """The name of this tool turn is that of the call it answers, so that it says nothing new."""
    turn = messages[at]
    if turn["role"] != "tool":
        return False
    asked, calls = _calls_before(messages, at)
    answered = turn.get("tool_call_id")
    if answered is not None and any(call.get("id") == answered for call in calls):
        calls = [call for call in calls if call.get("id") == answered]
    else:
        calls = calls[at - asked - 1 : at - asked]
    return any(call["function"]["name"] == turn["name"] for call in calls)


def _out_of_order(messages: Sequence[Mapping[str, Any]], at: int) -> bool:
    asked, calls = _calls_before(messages, at)
    answered, number = messages[at].get("tool_call_id"), at - asked - 1
    if answered is None or not any(call.get("id") == answered for call in calls):
        return False
    return number >= len(calls) or calls[number].get("id") != answered


def usual_shape(chat: Asked, prompt: bool) -> Hashable:
    """Shape of a chat whose turns have content and nothing else that must come out."""
    return tuple([turn["role"] for turn in chat.messages]), prompt


def shape_of(chat: Asked, leaves: Sequence[Leaf], learned: Collection[int], prompt: bool) -> Hashable:
    """Chats of one shape are written in one way, as far as templates go by fields and not by words."""
    if [leaf.kind for leaf in leaves] == ["content"] * len(chat.messages):
        return usual_shape(chat, prompt)
    fields = tuple((turn["role"], at in learned, *sorted(turn)) for at, turn in enumerate(chat.messages))
    kinds = frozenset((leaf.kind, leaf.message, leaf.text is None, leaf.path.count("[")) for leaf in leaves)
    return fields, kinds, prompt


# --- added words -------------------------------------------------------------------------------------------


def added_word(number: int) -> str:
    """Nine letters and digits (as much as the id of a call may have in Mistral's templates), all digits where a number
    is wanted."""
    return f"{730_000_000 + number}"


class AddedWords:
    """Adds a word to every field of a chat that must come out, or to the one of that number."""

    def __init__(self, only: int | None) -> None:
        self._only = only
        self._number = 0

    def added(self, chat: Asked, learned: Collection[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        messages = [dict(turn) for turn in chat.messages]
        for at, turn in enumerate(messages):
            content = turn.get("content")
            if isinstance(content, str) and content.strip():
                thoughts, rest = _thoughts(turn)
                if thoughts and at in learned:
                    thoughts = self._text(thoughts.removesuffix("</think>")) + "\n</think>"
                turn["content"] = thoughts + (self._text(rest) if rest.strip() else rest)
            if len(turn) == 2:
                continue
            if at in learned and (turn.get("reasoning_content") or "").strip():
                turn["reasoning_content"] = self._text(turn["reasoning_content"])
            if turn.get("name") and not _is_called(chat.messages, at):
                turn["name"] = self._text(turn["name"])
            calls = []
            for call in turn.get("tool_calls") or ():
                function = call["function"]
                name = self._name(function["name"])
                calls.append(
                    {**call, "function": {**function, "name": name, "arguments": self._in(function["arguments"])}}
                )
            if calls:
                turn["tool_calls"] = calls
            if turn["role"] == "tool" and _out_of_order(chat.messages, at):
                self._id(messages, at)
        return messages, [{**tool, "function": self._in(tool["function"], schema=True)} for tool in chat.tools]

    def _next(self) -> str | None:
        self._number += 1
        return added_word(self._number - 1) if self._only in (None, self._number - 1) else None

    def _text(self, text: str) -> str:
        word = self._next()
        return text if word is None else f"{text.rstrip()} {word}"

    def _name(self, name: str) -> str:
        word = self._next()
        return name if word is None else f"{name}_{word}"

    def _id(self, messages: list[dict[str, Any]], at: int) -> None:
        word, old = self._next(), messages[at]["tool_call_id"]
        if word is None:
            return
        messages[at]["tool_call_id"] = word
        asked, _ = _calls_before(messages, at)
        messages[asked]["tool_calls"] = [
            {**call, "id": word} if call.get("id") == old else call for call in messages[asked]["tool_calls"]
        ]

    def _in(self, value: Any, *, schema: bool = False, names: bool = False) -> Any:
        """As `_parts` goes through it."""
        match value:
            case dict():
                found = {}
                for key, item in value.items():
                    if schema and not names and key in _REWRITTEN:
                        found[key] = item
                        continue
                    written = self._name(key) if key and (names or not schema) else key
                    found[written] = self._in(item, schema=schema, names=schema and not names and key in _NAMING)
                return found
            case list() | tuple():
                return [self._in(item, schema=schema) for item in value]
            case str():
                return self._name(value) if value.strip() else value
            case bool() | None if schema:
                return value
            case _:
                word = self._next()
                return value if word is None else int(word)
