"""Chats for property tests: any text, with what templates trip over."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from core.data.rows import Chat, Message, ToolCall

_AWKWARD = st.sampled_from(
    [
        " ",
        "\n",
        "\n\n",
        "\t",
        "ü",
        "日本",
        "🙂",
        "1234567",
        "<",
        "|>",
        "[",
        "] ",
        "{{ x }}",
        "{% if %}",
        "'",
        '"',
        "\\n",
        "Be",
        "the",
    ]
)
_PLAIN = st.characters(codec="utf-8", exclude_categories=("Cs", "Co", "Cc"))
TEXTS = st.lists(_AWKWARD | st.text(_PLAIN, max_size=6), min_size=1, max_size=5).map("".join)
ANSWERS = TEXTS.filter(lambda text: bool(text.strip()))
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Adds <two> numbers & says ü.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]},
        },
    }
    for name in ("add", "look")
)


@st.composite
def chats(draw: st.DrawFn, *, system: bool = True, answered: bool = True) -> Chat:
    """At most one system message, then user and assistant in turns; `answered`: the assistant has the last word."""
    messages = [Message("system", draw(TEXTS))] if system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [Message("user", draw(TEXTS)), Message("assistant", draw(ANSWERS))]
    if not answered and draw(st.booleans()):
        messages.append(Message("user", draw(TEXTS)))
    return Chat(tuple(messages))


@st.composite
def tool_chats(draw: st.DrawFn) -> Chat:
    """As `chats`, with tools that are called and answer."""
    messages = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages.append(Message("user", draw(TEXTS)))
        for _ in range(draw(st.integers(0, 2))):
            arguments = draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers() | TEXTS, max_size=2))
            calls = tuple(ToolCall(str(at), "add", arguments) for at in range(draw(st.integers(1, 2))))
            messages.append(Message("assistant", draw(st.just("") | ANSWERS), tool_calls=calls))
            messages += [Message("tool", draw(TEXTS), tool_call_id=call.id) for call in calls]
        messages.append(Message("assistant", draw(ANSWERS)))
    return Chat(tuple(messages), TOOLS if draw(st.booleans()) else ())
