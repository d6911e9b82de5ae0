"""Turns of a chat, tool definitions and tool calls, as OpenAI's API and Hugging Face's chat templates write them
(https://platform.openai.com/docs/guides/supervised-fine-tuning, https://huggingface.co/docs/transformers/chat_extras).
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from core.data.decode import decode
from core.data.faults import Faults, kind, optional_text, text
from core.data.rows import Chat, Message, Role, ToolCall

ROLES = get_args(Role)
_KEYS = ("role", "content", "name", "weight", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
_NOT_EVERYWHERE = ("name", "tool_calls", "reasoning_content", "reasoning")
"""Keys that a chat template may have no place for."""
_EMPTY = Message("", "")

Ends = Literal["answer", "question"]
"""What the last turn is: the assistant's, or one that an answer is to come to."""


def read_messages(value: dict[str, Any], faults: Faults) -> Chat | None:
    """`{"messages": […], "tools": […]}`."""
    messages = turns(value["messages"], "messages", faults, ends="answer")
    tools = tool_definitions(value, faults)
    answers = [turn for turn in messages or () if turn.role == "assistant"]
    if answers and all(turn.weight == 0 for turn in answers):
        faults.add("nothing_to_learn", "every assistant turn has `weight` 0, so nothing is learned", "messages")
    return None if messages is None else Chat(messages, tools)


def turns(value: Any, where: str, faults: Faults, *, ends: Ends) -> tuple[Message, ...] | None:
    """A list of messages in an order that makes sense; None when it is no list, or an empty one."""
    if not isinstance(value, list):
        faults.add("invalid_type", f"expected a list of messages, not {kind(value)}", where)
        return None
    if not value:
        faults.add("empty", "a chat has at least one message", where)
        return None
    found = tuple(message(item, f"{where}[{at}]", faults) for at, item in enumerate(value))
    check_order(found, where, faults, ends=ends)
    return found


def message(item: Any, where: str, faults: Faults) -> Message:
    """One turn; keys that are null are as absent, any other key that we cannot hand on is a fault."""
    if not isinstance(item, dict):
        faults.add("invalid_type", f"a message is an object with `role` and `content`, not {kind(item)}", where)
        return _EMPTY
    for key in item:
        if key not in _KEYS and item[key] is not None:
            way_out = "; write the call as `tool_calls`" if key == "function_call" else ""
            words = f"a message has {', '.join(f'`{name}`' for name in _KEYS)}; this would be lost{way_out}"
            faults.add("unsupported_field", words, f"{where}.{str(key)[:40]}")
    role = item.get("role")
    if role not in ROLES:
        given = f"not {kind(role)}" if not isinstance(role, str) else f"not {role[:40]!r}"
        words = f"a role is {', '.join(f'`{name}`' for name in ROLES[:-1])} or `{ROLES[-1]}`, {given}"
        faults.add("unknown_role", words, f"{where}.role")
        role = ""
    assert isinstance(role, str)
    calls = _tool_calls(item.get("tool_calls"), f"{where}.tool_calls", faults)
    if calls and role not in ("assistant", ""):
        faults.add("unsupported_field", "only the assistant calls tools", f"{where}.tool_calls")
    for key in _NOT_EVERYWHERE:
        if item.get(key):
            faults.fields[key] = None
    reasoning = optional_text(item, "reasoning_content", f"{where}.reasoning_content", faults)
    if item.get("reasoning") is not None:
        if reasoning is not None:
            words = "`reasoning` and `reasoning_content` are two names of one thing; give one"
            faults.add("ambiguous_row", words, f"{where}.reasoning")
        reasoning = optional_text(item, "reasoning", f"{where}.reasoning", faults)
    return Message(
        role,
        _content(item, where, faults, filled=role == "assistant" and not calls),
        name=optional_text(item, "name", f"{where}.name", faults),
        weight=_weight(item.get("weight"), role, f"{where}.weight", faults),
        tool_calls=calls,
        tool_call_id=optional_text(item, "tool_call_id", f"{where}.tool_call_id", faults),
        reasoning=reasoning,
    )


def _content(item: dict[str, Any], where: str, faults: Faults, *, filled: bool) -> str:
    where = f"{where}.content"
    content = item.get("content")
    if content is None and item.get("tool_calls"):
        return ""
    if "content" not in item:
        faults.add("missing_field", "a message needs `content`", where)
        return ""
    if isinstance(content, list) and content:  # OpenAI's parts: those of text are joined
        parts = []
        for at, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or set(part) - {"type", "text"}:
                words = 'content is a string, or parts {"type": "text", "text": "…"}; no other part can be trained on'
                faults.add("invalid_type", words, where)
                return ""
            parts.append(text(part.get("text"), f"{where}[{at}].text", faults))
        content = "".join(parts)
    return text(content, where, faults, filled=filled)


def _weight(weight: Any, role: str, where: str, faults: Faults) -> float | None:
    if weight is None:
        return None
    if isinstance(weight, bool) or weight not in (0, 1):
        faults.add("invalid_value", "a weight is 0 (not learned) or 1", where)
        return None
    if role not in ("assistant", ""):
        faults.add("unsupported_field", "only the assistant's turns are learned, so only they have a weight", where)
    return float(weight)


def check_order(messages: tuple[Message, ...], where: str, faults: Faults, *, ends: Ends) -> None:
    """System or developer turns come first, tool turns answer calls, and the last turn is whose it must be."""
    open_calls: set[str] | None = None
    begun = False
    for at, turn in enumerate(messages):
        place = f"{where}[{at}].role"
        match turn.role:
            case "system" | "developer":
                if begun:
                    words = f"a {turn.role} turn stands before all others"
                    faults.add("role_order", words, place)
            case "tool":
                if open_calls is None:
                    faults.add("role_order", "a tool turn answers an assistant turn with `tool_calls`", place)
                elif turn.tool_call_id is not None and open_calls and turn.tool_call_id not in open_calls:
                    words = f"no call before it has the id {turn.tool_call_id[:40]!r}"
                    faults.add("unknown_call", words, f"{where}[{at}].tool_call_id")
                begun = True
            case "assistant":
                open_calls = {call.id for call in turn.tool_calls if call.id} if turn.tool_calls else None
                begun = True
            case "user":
                open_calls = None
                begun = True
            case _:
                return  # a role that is wrong was told already
    last = messages[-1].role
    place = f"{where}[{len(messages) - 1}].role"
    if ends == "answer" and last != "assistant":
        faults.add("no_answer", "the last message must be the assistant's: it is what is learned", place)
    elif ends == "question" and last not in ("user", "tool"):
        faults.add("no_question", "the last message of a prompt is the user's (or a tool's): the answer follows", place)


# --- tools -----------------------------------------------------------------------------------------


def tool_definitions(value: dict[str, Any], faults: Faults) -> tuple[dict[str, Any], ...]:
    """`tools` of a row in the shape that chat templates take, from OpenAI's, from bare functions, or from either as
    JSON text (as ShareGPT rows and Parquet files have it)."""
    if value.get("functions"):
        words = "`functions` is the old name and would be lost; write them as `tools`"
        faults.add("unsupported_field", words, "functions")
    tools = value.get("tools")
    if isinstance(tools, str):
        tools = _json_text(tools, "tools", faults) if tools.strip() else None
    if tools is None:
        return ()
    if not isinstance(tools, list):
        faults.add("invalid_type", f"expected a list of tools, not {kind(tools)}", "tools")
        return ()
    found = []
    if tools:
        faults.fields["tools"] = None
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else tool
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            words = 'a tool is {"type": "function", "function": {"name": "…", "parameters": {…}}}'
            faults.add("invalid_type", f"{words}, not {kind(tool)} without a function's name", where)
            continue
        if not isinstance(function.get("parameters", {}), dict | None):
            faults.add("invalid_type", "parameters are a JSON schema, an object", f"{where}.function.parameters")
            continue
        found.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return tuple(found)


def _tool_calls(value: Any, where: str, faults: Faults) -> tuple[ToolCall, ...]:
    if value is None or value == []:
        return ()
    if not isinstance(value, list):
        faults.add("invalid_type", f"expected a list of calls, not {kind(value)}", where)
        return ()
    calls = []
    for at, call in enumerate(value):
        place = f"{where}[{at}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
            words = 'a call is {"id": "…", "type": "function", "function": {"name": "…", "arguments": "{…}"}}'
            faults.add("invalid_type", words, place)
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json_text(arguments, f"{place}.function.arguments", faults)
        if not isinstance(arguments, dict):
            words = f"arguments are an object, or one as JSON text, not {kind(arguments)}"
            faults.add("invalid_type", words, f"{place}.function.arguments")
            continue
        calls.append(ToolCall(optional_text(call, "id", f"{place}.id", faults), name, arguments))
    return tuple(calls)


def _json_text(value: str, where: str, faults: Faults) -> Any:
    try:
        return decode(value)
    except (ValueError, RecursionError) as error:
        words = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        faults.add("invalid_json", f"the text must be JSON: {words}", where)
        return {}
