"""ShareGPT: `{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}], "system": "…",
"tools": "[…]"}`. It becomes a chat.
"""

from __future__ import annotations

from typing import Any

from core.data.decode import decode
from core.data.faults import Faults, kind, optional_text, text
from core.data.formats.chat import Ends, check_order, tool_definitions
from core.data.rows import Chat, Message, ToolCall

ROLES = {"system": "system", "human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}
"""Names of LLaMA-Factory's and FastChat's files; `user` and `assistant` are taken as well."""
_ROLES = ROLES | {"user": "user", "assistant": "assistant", "tool": "tool"}


def read_sharegpt(value: dict[str, Any], faults: Faults) -> Chat | None:
    messages = conversation(value, faults, ends="answer")
    return None if messages is None else Chat(messages, tool_definitions(value, faults))


def conversation(value: dict[str, Any], faults: Faults, *, ends: Ends) -> tuple[Message, ...] | None:
    """`conversations` with the row's `system` before it."""
    items = value["conversations"]
    if not isinstance(items, list):
        faults.add("invalid_type", f"expected a list of turns, not {kind(items)}", "conversations")
        return None
    if not items:
        faults.add("empty", "a conversation has at least one turn", "conversations")
        return None
    found = tuple(turn(item, f"conversations[{at}]", faults) for at, item in enumerate(items))
    check_order(found, "conversations", faults, ends=ends)
    system = optional_text(value, "system", "system", faults)
    if not system:
        return found
    if found[0].role == "system":
        faults.add("ambiguous_row", "a system turn stands in the conversation too; keep one of them", "system")
    return (Message("system", system), *found)


def turn(item: Any, where: str, faults: Faults) -> Message:
    if not isinstance(item, dict) or "from" not in item or "value" not in item:
        way_out = ""
        if isinstance(item, dict) and {"role", "content"} <= item.keys():
            way_out = "; turns with `role` and `content` are of format `messages`: map `columns: {messages: …}`"
        words = f"a turn is an object with `from` and `value`, not {kind(item)} without them{way_out}"
        faults.add("invalid_type", words, where)
        return Message("", "")
    for key in item:
        if key not in ("from", "value", "weight") and item[key] is not None:
            faults.add("unsupported_field", "a turn has `from` and `value`; this would be lost", f"{where}.{key[:40]}")
    speaker = item["from"]
    role = _ROLES.get(speaker, "") if isinstance(speaker, str) else ""
    if not role:
        given = repr(speaker[:40]) if isinstance(speaker, str) else kind(speaker)
        faults.add("unknown_role", f"`from` is one of {', '.join(_ROLES)}, not {given}", f"{where}.from")
    weight = item.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        faults.add("invalid_value", "a weight is 0 (not learned) or 1", f"{where}.weight")
        weight = None
    content = text(item["value"], f"{where}.value", faults, filled=role == "assistant")
    if speaker == "function_call":
        faults.fields["tool_calls"] = None
        return Message(role, "", tool_calls=_calls(content, f"{where}.value", faults))
    return Message(role, content, weight=None if weight is None else float(weight))


def _calls(content: str, where: str, faults: Faults) -> tuple[ToolCall, ...]:
    """`{"name": "…", "arguments": {…}}` as JSON text, or a list of such."""
    try:
        value = decode(content)
    except (ValueError, RecursionError) as error:
        faults.add("invalid_json", f"a function call is JSON text: {error}", where)
        return ()
    calls = value if isinstance(value, list) else [value]
    found = []
    for call in calls:
        if (
            not isinstance(call, dict)
            or not isinstance(call.get("name"), str)
            or not isinstance(call.get("arguments"), dict)
        ):
            faults.add("invalid_type", 'a function call is {"name": "…", "arguments": {…}}', where)
            return ()
        found.append(ToolCall(None, call["name"], call["arguments"]))
    return tuple(found)
